"""The rows' own keys and values put into the pool in Triton: both in one launch.

Twin of `tree_attention.write`. Legend: T rows, S slots, K key/value heads, D head size, E elements
of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.tree_attention import Keys

__all__ = ["write"]

_MOST = 1024  # elements of a program


def write(keys: Keys, slot_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
    """As its twin says, and the scratch slot keeps what pads wrote: no kernel reads it.

    Heads and entries of a row lie dense; rows may lie apart, as in a fused projection.
    """
    rows, kv, size = k_TKD.shape
    assert k_TKD.stride()[1:] == v_TKD.stride()[1:] == (size, 1)
    assert keys.k_SKD.is_contiguous() and keys.v_SKD.is_contiguous()
    width = min(_MOST, triton.next_power_of_2(kv * size))
    _write[(rows, triton.cdiv(kv * size, width))](
        keys.k_SKD,
        keys.v_SKD,
        slot_T,
        k_TKD,
        v_TKD,
        kv * size,
        k_TKD.stride(0),
        v_TKD.stride(0),
        E=width,
        num_warps=max(1, width // 256),
    )


@triton.jit
def _write(
    pool_k_ptr,
    pool_v_ptr,
    slot_ptr,
    k_ptr,
    v_ptr,
    size,
    k_stride,
    v_stride,
    E: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    e_E = tl.program_id(1) * E + tl.arange(0, E)
    used_E = e_E < size
    to_E = tl.load(slot_ptr + row) * size + e_E
    k_E = tl.load(k_ptr + row * k_stride + e_E, mask=used_E)
    v_E = tl.load(v_ptr + row * v_stride + e_E, mask=used_E)
    tl.store(pool_k_ptr + to_E, k_E, mask=used_E)
    tl.store(pool_v_ptr + to_E, v_E, mask=used_E)
