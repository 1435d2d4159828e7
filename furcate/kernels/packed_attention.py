"""Causal attention over conversations laid end to end, and its gradients.

What flash attention (Dao 2023, arXiv:2307.08691) keeps for its backward pass is given out, so that
a caller may merge further keys into it. Legend: T flat rows, H query heads, K key/value heads,
D head size, S conversations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["Gradients", "Packing", "Seen", "packed_attention", "packed_gradients"]

_FLASH_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Packing:
    """Where conversations lie in flat rows: the s-th is rows bounds[s] to bounds[s + 1]."""

    bounds: tuple[int, ...]  # S + 1 numbers, from 0 to T
    bounds_S1: Tensor  # the same, int32, on the device

    @classmethod
    def of(cls, bounds: tuple[int, ...], device: torch.device) -> Packing:
        """That of these bounds."""
        on_host = torch.tensor(bounds, dtype=torch.int32)
        if device.type == "cuda":
            on_host = on_host.pin_memory()  # else the copy waits for the device
        return cls(bounds, on_host.to(device, non_blocking=True))

    @property
    def longest(self) -> int:
        """Rows of the longest conversation."""
        return max(end - start for start, end in pairwise(self.bounds))


@dataclass(frozen=True, slots=True)
class Seen:
    """What the rows saw, and what the backward pass needs."""

    out_THD: Tensor
    lse_HT: Tensor  # float32 or float64: logarithm of the sum of a row's weights
    extra: tuple[Tensor, ...] = ()  # of the flash kernel: its unused random state


@dataclass(frozen=True, slots=True)
class Gradients:
    """Of queries, keys and values."""

    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor


def packed_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, packing: Packing) -> Seen:
    """Row t sees the rows of its conversation up to itself; head h reads key head h // (H / K).

    On a GPU in half precision by torch's flash kernel, else conversation by conversation in torch.
    """
    if _has_flash(q_THD):
        at, longest = packing.bounds_S1, packing.longest
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q_THD, k_TKD, v_TKD, at, at, longest, longest, 0.0, True, False
        )
        return Seen(out, lse, (state, unused))
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    lse_HT = q_THD.new_empty(q_THD.shape[1], len(q_THD), dtype=_precise(q_THD.dtype))
    for piece in _slices(packing):
        score_HTT = _scores(q_THD[piece], k_TKD[piece])
        lse_HT[:, piece] = score_HTT.logsumexp(-1)
        weight_HTT = (score_HTT - lse_HT[:, piece, None]).exp()
        v_HTD = _by_query_head(v_TKD[piece], q_THD.shape[1])
        out_THD[piece] = (weight_HTT @ v_HTD).transpose(0, 1).to(out_THD.dtype)
    return Seen(out_THD, lse_HT)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What `packed_attention` was called with."""

    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    packing: Packing


def packed_gradients(grad_THD: Tensor, inputs: Inputs, seen: Seen) -> Gradients:
    """Gradients with respect to the inputs (FlashAttention-2, algorithm 2).

    Weights are exp(score - seen.lse), and a row's inner product of `grad` and `seen.out` is taken
    off: with `out` and `lse` of a softmax over these keys *and others* this gives exactly the part
    of the gradients that belongs to these keys.
    """
    q_THD, k_TKD, v_TKD, packing = inputs.q_THD, inputs.k_TKD, inputs.v_TKD, inputs.packing
    if _has_flash(q_THD):
        at, longest = packing.bounds_S1, packing.longest
        with _in_one_order():
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                grad_THD,
                q_THD,
                k_TKD,
                v_TKD,
                seen.out_THD,
                seen.lse_HT,
                at,
                at,
                longest,
                longest,
                0.0,
                True,
                *seen.extra,
            )
        return Gradients(dq, dk, dv)
    grads = Gradients(*(torch.empty_like(x) for x in (q_THD, k_TKD, v_TKD)))
    for piece in _slices(packing):
        part = Inputs(q_THD[piece], k_TKD[piece], v_TKD[piece], packing)
        one = _gradients(grad_THD[piece], part, Seen(seen.out_THD[piece], seen.lse_HT[:, piece]))
        grads.q_THD[piece], grads.k_TKD[piece], grads.v_TKD[piece] = one.q_THD, one.k_TKD, one.v_TKD
    return grads


def _gradients(grad_THD: Tensor, inputs: Inputs, seen: Seen) -> Gradients:
    """Of one conversation, densely."""
    heads, scale = grad_THD.shape[1], grad_THD.shape[2] ** -0.5
    groups = inputs.k_TKD.shape[1]
    grad_HTD, q_HTD = (_precisely(x).transpose(0, 1) for x in (grad_THD, inputs.q_THD))
    k_HTD, v_HTD = (_by_query_head(x, heads) for x in (inputs.k_TKD, inputs.v_TKD))
    weight_HTT = (_scores(inputs.q_THD, inputs.k_TKD) - seen.lse_HT[..., None]).exp()
    taken_HT1 = (grad_HTD * _precisely(seen.out_THD).transpose(0, 1)).sum(-1, keepdim=True)
    slope_HTT = weight_HTT * (grad_HTD @ v_HTD.mT - taken_HT1) * scale
    dk_HTD, dv_HTD = slope_HTT.mT @ q_HTD, weight_HTT.mT @ grad_HTD
    dk, dv = (x.unflatten(0, (groups, -1)).sum(1).transpose(0, 1) for x in (dk_HTD, dv_HTD))
    return Gradients((slope_HTT @ k_HTD).transpose(0, 1), dk, dv)


def _scores(q_THD: Tensor, k_TKD: Tensor) -> Tensor:
    """Scaled products [H, T, T], minus infinity above the diagonal."""
    q_HTD = _precisely(q_THD).transpose(0, 1)
    score_HTT: Tensor = q_HTD @ _by_query_head(k_TKD, q_THD.shape[1]).mT * q_THD.shape[2] ** -0.5
    later_TT = torch.ones(score_HTT.shape[1:], dtype=torch.bool, device=q_THD.device).triu(1)
    return score_HTT.masked_fill(later_TT, float("-inf"))


def _by_query_head(x_TKD: Tensor, heads: int) -> Tensor:
    return _precisely(x_TKD).repeat_interleave(heads // x_TKD.shape[1], 1).transpose(0, 1)


def _slices(packing: Packing) -> Iterator[slice]:
    return (slice(start, end) for start, end in pairwise(packing.bounds))


@contextmanager
def _in_one_order() -> Iterator[None]:
    """The flash kernel adds queries' slopes up by atomics unless torch is told to be deterministic.

    With many conversations at once the fixed order costs nothing, and runs can be repeated.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warning = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch._C._get_deterministic_fill_uninitialized_memory()
    # not torch.use_deterministic_algorithms, which would turn the compiler's settings over as well
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    torch._C._set_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=warning)
        torch._C._set_deterministic_fill_uninitialized_memory(filled)


def _has_flash(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in _FLASH_DTYPES


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _precisely(x: Tensor) -> Tensor:
    return x.to(_precise(x.dtype))
