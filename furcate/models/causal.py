"""Plain causal attention over one sequence: what training and tests hand to the decoder.

Legend: T positions of one sequence, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

__all__ = ["causal_attend"]


def causal_attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Row t sees the rows 0..t; query head h reads key head h // (H / K). Keeps no cache."""
    q_1HTD, k_1KTD, v_1KTD = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
    out_1HTD = functional.scaled_dot_product_attention(
        q_1HTD, k_1KTD, v_1KTD, is_causal=True, enable_gqa=q_THD.shape[1] != k_TKD.shape[1]
    )
    return out_1HTD[0].transpose(0, 1)
