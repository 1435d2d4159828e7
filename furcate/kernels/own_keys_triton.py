"""Own keys merged into attention in Triton: one program for some rows and one key head.

Twin of `own_keys`. Legend: T rows, H query heads, K key/value heads, G = H / K, D head size, J own
keys of a row, R rows of a program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.own_keys import Merged, Own, OwnGradients

__all__ = ["merge_own", "own_gradients"]

_ROWS = 16


def merge_own(q_THD: Tensor, own: Own, out_THD: Tensor, lse_HT: Tensor) -> tuple[Tensor, Tensor]:
    """As its twin says."""
    (total, heads, size), (count, _, kv, _) = q_THD.shape, own.k_JTKD.shape
    _check(q_THD, own)
    assert out_THD.is_contiguous() and lse_HT.is_contiguous()
    new_THD, new_HT = out_THD.new_empty(out_THD.shape), lse_HT.new_empty(lse_HT.shape)
    _merge[(triton.cdiv(total, _ROWS), kv)](
        q_THD,
        own.k_JTKD,
        own.v_JTKD,
        out_THD,
        lse_HT,
        new_THD,
        new_HT,
        total,
        q_THD.stride(0),
        count,
        size**-0.5,
        K=kv,
        G=heads // kv,
        D=size,
        R=_ROWS,
        num_warps=4,
    )
    return new_THD, new_HT


def own_gradients(grad_THD: Tensor, merged: Merged, own: Own, dq_THD: Tensor) -> OwnGradients:
    """As its twin says."""
    (total, heads, size), (count, _, kv, _) = grad_THD.shape, own.k_JTKD.shape
    _check(merged.q_THD, own)
    assert grad_THD.is_contiguous() and merged.out_THD.is_contiguous() and dq_THD.is_contiguous()
    dk_JTKD, dv_JTKD = (x.new_empty(x.shape) for x in (own.k_JTKD, own.v_JTKD))
    _gradients[(triton.cdiv(total, _ROWS), kv)](
        grad_THD,
        merged.q_THD,
        merged.out_THD,
        merged.lse_HT,
        own.k_JTKD,
        own.v_JTKD,
        dq_THD,
        dk_JTKD,
        dv_JTKD,
        total,
        merged.q_THD.stride(0),
        count,
        size**-0.5,
        K=kv,
        G=heads // kv,
        D=size,
        R=_ROWS,
        num_warps=4,
    )
    return OwnGradients(dk_JTKD, dv_JTKD)


def _check(q_THD: Tensor, own: Own) -> None:
    size = q_THD.shape[-1]
    assert q_THD.stride()[1:] == (size, 1) and size == triton.next_power_of_2(size)
    assert own.k_JTKD.is_contiguous() and own.v_JTKD.is_contiguous()


@triton.jit
def _merge(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    new_ptr,
    new_lse_ptr,
    total,
    q_stride,
    count,
    scale,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
):
    """Some rows, the query heads of one key head."""
    row_R = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    kv = tl.program_id(1)
    d_D = tl.arange(0, D)
    used_R = row_R < total
    used_RD = used_R[:, None]
    key_RD = (row_R[:, None] * K + kv) * D + d_D
    for g in tl.static_range(G):
        head = kv * G + g
        at_RD = (row_R[:, None] * (K * G) + head) * D + d_D
        q_RD = tl.load(q_ptr + row_R[:, None] * q_stride + head * D + d_D, used_RD, other=0.0)
        q_RD = q_RD.to(tl.float32) * scale
        out_RD = tl.load(out_ptr + at_RD, used_RD, other=0.0).to(tl.float32)
        lse_R = tl.load(lse_ptr + head * total + row_R, used_R, other=0.0)
        at = key_RD
        for _ in range(count):
            k_RD = tl.load(k_ptr + at, used_RD, other=0.0).to(tl.float32)
            v_RD = tl.load(v_ptr + at, used_RD, other=0.0).to(tl.float32)
            score_R = tl.sum(q_RD * k_RD, 1)
            most_R = tl.maximum(lse_R, score_R)
            new_R = most_R + tl.log(tl.exp(lse_R - most_R) + tl.exp(score_R - most_R))
            old_R = tl.exp(lse_R - new_R)
            out_RD = out_RD * old_R[:, None] + tl.exp(score_R - new_R)[:, None] * v_RD
            lse_R = new_R
            at += total * (K * D)
        tl.store(new_ptr + at_RD, out_RD, used_RD)
        tl.store(new_lse_ptr + head * total + row_R, lse_R, used_R)


@triton.jit
def _gradients(
    grad_ptr,
    q_ptr,
    out_ptr,
    lse_ptr,
    k_ptr,
    v_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    total,
    q_stride,
    count,
    scale,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
):
    """Some rows, one key head: queries' slopes with keys innermost, then keys' with heads so."""
    row_R = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    kv = tl.program_id(1)
    d_D = tl.arange(0, D)
    used_R = row_R < total
    used_RD = used_R[:, None]
    key_RD = (row_R[:, None] * K + kv) * D + d_D
    for g in tl.static_range(G):
        head = kv * G + g
        at_RD = (row_R[:, None] * (K * G) + head) * D + d_D
        q_RD = tl.load(q_ptr + row_R[:, None] * q_stride + head * D + d_D, used_RD, other=0.0)
        q_RD = q_RD.to(tl.float32)
        grad_RD = tl.load(grad_ptr + at_RD, used_RD, other=0.0).to(tl.float32)
        out_RD = tl.load(out_ptr + at_RD, used_RD, other=0.0).to(tl.float32)
        taken_R = tl.sum(grad_RD * out_RD, 1)
        lse_R = tl.load(lse_ptr + head * total + row_R, used_R, other=0.0)
        dq_RD = tl.load(dq_ptr + at_RD, used_RD, other=0.0).to(tl.float32)
        at = key_RD
        for _ in range(count):
            k_RD = tl.load(k_ptr + at, used_RD, other=0.0).to(tl.float32)
            v_RD = tl.load(v_ptr + at, used_RD, other=0.0).to(tl.float32)
            weight_R = tl.exp(tl.sum(q_RD * k_RD, 1) * scale - lse_R)
            slope_R = weight_R * (tl.sum(grad_RD * v_RD, 1) - taken_R) * scale
            dq_RD += slope_R[:, None] * k_RD
            at += total * (K * D)
        tl.store(dq_ptr + at_RD, dq_RD, used_RD)
    at = key_RD
    for _ in range(count):
        k_RD = tl.load(k_ptr + at, used_RD, other=0.0).to(tl.float32)
        v_RD = tl.load(v_ptr + at, used_RD, other=0.0).to(tl.float32)
        dk_RD = tl.zeros((R, D), tl.float32)
        dv_RD = tl.zeros((R, D), tl.float32)
        for g in tl.static_range(G):
            head = kv * G + g
            at_RD = (row_R[:, None] * (K * G) + head) * D + d_D
            q_RD = tl.load(q_ptr + row_R[:, None] * q_stride + head * D + d_D, used_RD, other=0.0)
            q_RD = q_RD.to(tl.float32)
            grad_RD = tl.load(grad_ptr + at_RD, used_RD, other=0.0).to(tl.float32)
            out_RD = tl.load(out_ptr + at_RD, used_RD, other=0.0).to(tl.float32)
            taken_R = tl.sum(grad_RD * out_RD, 1)
            lse_R = tl.load(lse_ptr + head * total + row_R, used_R, other=0.0)
            weight_R = tl.exp(tl.sum(q_RD * k_RD, 1) * scale - lse_R)
            slope_R = weight_R * (tl.sum(grad_RD * v_RD, 1) - taken_R) * scale
            dk_RD += slope_R[:, None] * q_RD
            dv_RD += weight_R[:, None] * grad_RD
        tl.store(dk_ptr + at, dk_RD, used_RD)
        tl.store(dv_ptr + at, dv_RD, used_RD)
        at += total * (K * D)
