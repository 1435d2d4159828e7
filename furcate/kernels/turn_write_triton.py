"""Queries and keys turned to their positions, keys and values put into the pool: in one launch.

Legend: T rows, A = H + 2 K heads of a fused projection (queries, keys, values), D head size, S
slots, B heads of a program, F = D / 2 pairs of a head.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.tree_attention import Keys
from furcate.pdl import LAUNCH, let_next_begin, wait_for_last

__all__ = ["turn_write"]

_LANES = 512  # pairs of a program


def turn_write(
    qkv_TAD: Tensor, angles: tuple[Tensor, Tensor], keys: Keys, slot_T: Tensor
) -> Tensor:
    """What `models.rope.turn` and then `tree_attention.write` do; the turned queries, [T, H, D].

    Args:
        qkv_TAD: heads and entries of a row lie dense.
        angles: cosines and sines [T, 1, D], the first half of the sines negated, as a `Turn` has
            them.
        keys: the layer's pool; the scratch slot keeps what pads write.
        slot_T: int64, where each row's keys go.
    """
    (rows, heads, size), kv = qkv_TAD.shape, keys.k_SKD.shape[1]
    cos_T1D, sin_T1D = angles
    assert qkv_TAD.stride()[1:] == (size, 1) and size == triton.next_power_of_2(size)
    assert cos_T1D.is_contiguous() and sin_T1D.is_contiguous() and slot_T.is_contiguous()
    assert keys.k_SKD.is_contiguous() and keys.v_SKD.is_contiguous()
    q_THD = qkv_TAD.new_empty((rows, heads - 2 * kv, size))
    block = min(triton.next_power_of_2(heads), max(1, _LANES // (size // 2)))
    _turn_write[(rows, triton.cdiv(heads, block))](
        qkv_TAD,
        cos_T1D,
        sin_T1D,
        slot_T,
        q_THD,
        keys.k_SKD,
        keys.v_SKD,
        qkv_TAD.stride(0),
        H=heads - 2 * kv,
        K=kv,
        F=size // 2,
        B=block,
        num_warps=max(1, block * size // 512),
        **LAUNCH,
    )
    return q_THD


@triton.jit
def _turn_write(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    stride,
    H: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    B: tl.constexpr,
):
    """Some heads of one row; pair i of a head is entries i and i + F."""
    let_next_begin()
    wait_for_last()
    row = tl.program_id(0).to(tl.int64)
    a_B1 = (tl.program_id(1) * B + tl.arange(0, B))[:, None]
    pair_1F = tl.arange(0, F)[None, :]
    used = (a_B1 < H + 2 * K) & (pair_1F < F)
    at = row * stride + a_B1 * (2 * F) + pair_1F
    first = tl.load(qkv_ptr + at, mask=used, other=0.0)
    second = tl.load(qkv_ptr + at + F, mask=used, other=0.0)
    cos = tl.load(cos_ptr + row * (2 * F) + pair_1F).to(tl.float32)
    # the second half of `sin` has the sign of the turn, the first its opposite
    sin = tl.load(sin_ptr + row * (2 * F) + F + pair_1F).to(tl.float32)
    x, y = first.to(tl.float32), second.to(tl.float32)
    turned_first = (x * cos - y * sin).to(first.dtype)
    turned_second = (y * cos + x * sin).to(first.dtype)

    slot = tl.load(slot_ptr + row)
    is_q = used & (a_B1 < H)
    q_at = (row * H + a_B1) * (2 * F) + pair_1F
    tl.store(q_ptr + q_at, turned_first, mask=is_q)
    tl.store(q_ptr + q_at + F, turned_second, mask=is_q)
    is_k = used & (a_B1 >= H) & (a_B1 < H + K)
    k_at = (slot * K + a_B1 - H) * (2 * F) + pair_1F
    tl.store(k_ptr + k_at, turned_first, mask=is_k)
    tl.store(k_ptr + k_at + F, turned_second, mask=is_k)
    is_v = used & (a_B1 >= H + K)
    v_at = (slot * K + a_B1 - H - K) * (2 * F) + pair_1F
    tl.store(v_ptr + v_at, first, mask=is_v)
    tl.store(v_ptr + v_at + F, second, mask=is_v)
