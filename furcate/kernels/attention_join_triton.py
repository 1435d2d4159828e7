"""The splits of tree attention joined, in Triton: by the last one to arrive, or in a launch.

A part is a split's weighted mean of a row and head, and the base-2 logarithm of its weights' sum.
Legend: B requests, T flat rows, H query heads, D head size, X splits at a time, S all of them,
F packed rows of one key head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.pdl import LAUNCH, let_next_begin, wait_for_last

__all__ = ["Parts", "Shares", "fold_parts", "join", "tickets", "used_splits"]

_JOINED = 16  # splits that are joined in one step
_MOST_TICKETS = 4096
_TICKETS: dict[tuple[torch.device, int], Tensor] = {}


@dataclass(frozen=True, slots=True)
class Shares:
    """How the columns of a request are shared, as `used_splits` reads it."""

    splits: int
    chunk: int
    in_turn: bool
    first: int
    columns: int  # of a step


@dataclass(frozen=True, slots=True)
class Parts:
    """What the splits found."""

    out_XTHD: Tensor  # float32
    weight_XTH: Tensor  # float32; minus infinity where nothing was seen

    @staticmethod
    def of(q_THD: Tensor, splits: int) -> Parts:
        """Unwritten."""
        out_XTHD = q_THD.new_empty((splits, *q_THD.shape), dtype=torch.float32)
        return Parts(out_XTHD, out_XTHD.new_empty(out_XTHD.shape[:3]))


def tickets(pool_SKD: Tensor, programs: int) -> Tensor | None:
    """Counts of splits that have arrived, one for each of `programs`; whoever is last clears it.

    They belong to the pool of keys: passes over one pool follow one another, and those of two
    engines do not. None if there are not enough, or if a graph is being recorded and none are
    there yet, since they must outlive it.
    """
    if programs > _MOST_TICKETS:
        return None
    key = pool_SKD.device, pool_SKD.untyped_storage().data_ptr()
    if key not in _TICKETS:
        if pool_SKD.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        _TICKETS[key] = torch.zeros(_MOST_TICKETS, dtype=torch.int32, device=pool_SKD.device)
    return _TICKETS[key]


def join(q_THD: Tensor, parts: Parts, length_B: Tensor, live_B: Tensor, shares: Shares) -> Tensor:
    """The parts of all splits by their weights, [T, H, D], in a launch of its own."""
    total, heads, size = q_THD.shape
    out_THD = q_THD.new_empty(q_THD.shape)
    fixed = shares.chunk > 0
    _join[(total * heads,)](
        parts.out_XTHD,
        parts.weight_XTH,
        out_THD,
        length_B,
        live_B,
        total // len(live_B) * heads,
        total * heads,
        shares.splits,
        CHUNK=shares.chunk,
        TURNS=shares.in_turn,
        FIRST=shares.first,
        N=shares.columns,
        X=_JOINED if fixed else min(_JOINED, triton.next_power_of_2(shares.splits)),
        D=size,
        num_warps=1,
        **LAUNCH,
    )
    return out_THD


@triton.jit
def used_splits(
    width,
    splits,
    CHUNK: tl.constexpr,
    TURNS: tl.constexpr,
    FIRST: tl.constexpr,
    N: tl.constexpr,
):
    """How many splits a request of so many columns takes, at least one; the others stay silent."""
    if CHUNK > 0:
        used = tl.cdiv(width, CHUNK)
    else:
        steps = tl.cdiv(width, N) - FIRST // N
        if TURNS:
            used = tl.minimum(steps, splits)
        else:
            used = tl.cdiv(steps, tl.maximum(tl.cdiv(steps, splits), 1))
    return tl.maximum(used, 1)


@triton.jit
def fold_parts(
    ticket_ptr,
    part_ptr,
    weight_ptr,
    out_ptr,
    at_F,
    used_F,
    split,
    used,
    count,
    S: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
):
    """Joins all parts of some rows and heads if this split, whose own are stored, comes last."""
    if split < used:
        tl.debug_barrier()  # the parts of all threads are out before one thread says so
        if tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu") == used - 1:
            tl.store(ticket_ptr, 0)  # for the next launch
            _fold(part_ptr, weight_ptr, out_ptr, at_F, used_F, used, count, S, X, D)


@triton.jit
def _fold(
    part_ptr,
    weight_ptr,
    out_ptr,
    at_F,
    used_F,
    used,
    count,
    S: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
):
    """Reads pass by the processor's own cache, which may hold what was there before."""
    d_D = tl.arange(0, D)
    s_S = tl.arange(0, S)
    here_SF = (s_S < used)[:, None] & used_F[None, :]
    from_SF = s_S.to(tl.int64)[:, None] * count + at_F[None, :]
    weight_SF = tl.load(weight_ptr + from_SF, here_SF, other=float("-inf"), cache_modifier=".cg")
    best_F = tl.max(weight_SF, 0)
    best_F = tl.where(best_F == float("-inf"), 0.0, best_F)  # nothing seen
    sum_F = tl.sum(tl.exp2(weight_SF - best_F[None, :]), 0)
    acc_FD = tl.zeros((at_F.shape[0], D), tl.float32)
    for first in tl.static_range(0, S, X):  # unrolled: all reads are on their way at once
        x_X = first + tl.arange(0, X)
        here_XF = (x_X < used)[:, None] & used_F[None, :]
        from_XF = x_X.to(tl.int64)[:, None] * count + at_F[None, :]
        weight_XF = tl.load(
            weight_ptr + from_XF, here_XF, other=float("-inf"), cache_modifier=".cg"
        )
        part_XFD = tl.load(
            part_ptr + from_XF[:, :, None] * D + d_D[None, None, :],
            here_XF[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        acc_FD += tl.sum(part_XFD * tl.exp2(weight_XF - best_F[None, :])[:, :, None], 0)
    mean_FD = acc_FD / tl.where(sum_F == 0, 1.0, sum_F)[:, None]
    tl.store(out_ptr + at_F[:, None] * D + d_D[None, :], mean_FD, used_F[:, None])


@triton.jit(do_not_specialize=["of_request", "count", "splits"])
def _join(
    out_ptr,
    weight_ptr,
    joined_ptr,
    length_ptr,
    live_ptr,
    of_request,
    count,
    splits,
    CHUNK: tl.constexpr,
    TURNS: tl.constexpr,
    FIRST: tl.constexpr,
    N: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
):
    """One row and head: the splits' means by their weights; a split that saw nothing weighs 0."""
    let_next_begin()
    wait_for_last()
    at = tl.program_id(0).to(tl.int64)
    d_D = tl.arange(0, D)
    b = at // of_request
    width = (tl.load(length_ptr + b) + tl.load(live_ptr + b)).to(tl.int32)
    used = used_splits(width, splits, CHUNK, TURNS, FIRST, N)
    best = float("-inf")
    total = 0.0
    sum_D = tl.zeros((D,), tl.float32)
    for start in range(0, used, X):
        x_X = start + tl.arange(0, X)
        part_X = x_X * count + at
        weight_X = tl.load(weight_ptr + part_X, mask=x_X < used, other=float("-inf"))
        part_XD = tl.load(
            out_ptr + part_X[:, None] * D + d_D, mask=(x_X < used)[:, None], other=0.0
        )
        new = tl.maximum(best, tl.max(weight_X, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet
        share_X = tl.exp2(weight_X - safe)
        keep = tl.exp2(best - safe)
        total = total * keep + tl.sum(share_X, 0)
        sum_D = sum_D * keep + tl.sum(part_XD * share_X[:, None], 0)
        best = new
    mean_D = sum_D / tl.where(total == 0, 1.0, total)
    tl.store(joined_ptr + at * D + d_D, mean_D)
