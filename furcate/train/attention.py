"""Attention of unrolled steps: keys of true features up to a row, and its own of every later step.

Legend: T flat rows, H query heads, K key/value heads, D head size, J steps after the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from furcate.kernels.own_keys import Merged, Own
from furcate.kernels.packed_attention import (
    Inputs,
    Packing,
    Seen,
    packed_attention,
    packed_gradients,
)
from furcate.models.decoder import Attend
from furcate.train.twins import twin

__all__ = ["Unrolled", "packed_attend"]


def packed_attend(packing: Packing) -> Attend:
    """Plain causal attention of each conversation, without gradients: for the frozen target."""
    return lambda _, q, k, v: packed_attention(q, k, v, packing).out_THD


class Unrolled:
    """Attention of a head that is fed with its own states (EAGLE-3, section 3.2 and figure 6).

    A head calls it once for each of its layers and step. In step k, row t sees the keys of step 1
    at the rows of its conversation up to t, as at run time it sees those of verified positions,
    and the keys of steps 2 to k at row t alone: its own drafted ancestors.
    """

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._kept: dict[int, list[Tensor]] = {}

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        kept = self._kept.setdefault(layer, [])
        kept += (k_TKD, v_TKD)
        attended = _Attention.apply(self._packing, q_THD, *kept)  # type: ignore[no-untyped-call]
        out_THD: Tensor = attended
        return out_THD


class _Attention(torch.autograd.Function):
    """One softmax over both kinds of keys; the flash backward pass is given the joint result."""

    @staticmethod
    def forward(ctx: Any, packing: Packing, q_THD: Tensor, *kept: Tensor) -> Tensor:
        seen = packed_attention(q_THD, kept[0], kept[1], packing)
        own = None
        if len(kept) > 2:
            own = Own(torch.stack(kept[2::2]), torch.stack(kept[3::2]))
            merge = twin("own_keys", q_THD.device).merge_own
            out_THD, lse_HT = merge(q_THD, own, seen.out_THD, seen.lse_HT)
            seen = Seen(out_THD, lse_HT, seen.extra)
        ctx.packing = packing
        own_keys = () if own is None else (own.k_JTKD, own.v_JTKD)
        ctx.owned = len(own_keys)
        saved = (q_THD, kept[0], kept[1], seen.out_THD, seen.lse_HT, *own_keys, *seen.extra)
        ctx.save_for_backward(*saved)
        return seen.out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TKD, v_TKD, out_THD, lse_HT, *rest = ctx.saved_tensors
        grad_THD = grad_THD.contiguous()
        seen = Seen(out_THD, lse_HT, tuple(rest[ctx.owned :]))
        inputs = Inputs(q_THD, k_TKD, v_TKD, ctx.packing)
        slope = packed_gradients(grad_THD, inputs, seen)
        found = [slope.k_TKD, slope.v_TKD]
        dq_THD = slope.q_THD
        if ctx.owned:
            dq_THD = dq_THD.contiguous()
            gradients = twin("own_keys", q_THD.device).own_gradients
            own = Own(rest[0], rest[1])
            slopes = gradients(grad_THD, Merged(q_THD, out_THD, lse_HT), own, dq_THD)
            for k, v in zip(slopes.k_JTKD, slopes.v_JTKD, strict=True):
                found += (k, v)
        return (None, dq_THD, *found)
