"""A verdict cut, committed and told in Triton: one launch, a program a request.

Twin of `verify.stops.settle`. Legend: B requests, D levels, R rows, S stop ids, C slots, P pool
nodes, N numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.draft import Draft, Verdict
from furcate.kernels.entries import Book, Entries
from furcate.kernels.ledger import Settled

__all__ = ["settle"]

_STOP, _LENGTH = tl.constexpr(1), tl.constexpr(2)  # of `verify.stops.Finish`
_WIDE, _REAL = 8, 4  # bytes of a number, whole or not
_FLAGS = 3
_NODES = 1024  # a turn


def settle(
    book: Book,
    found: Entries,
    draft: Draft,
    verdict: Verdict,
    value_CP: Tensor | None = None,
    gains: int = 0,
) -> Settled:
    """As `furcate.verify.stops.settle`; its result lies as one block, as `Emitted` is packed.

    What is not kept is written nowhere.
    """
    batch, levels = verdict.emitted_BD.shape
    told = (verdict.emitted_BD, verdict.path_BD, verdict.count_B, verdict.accepted_B)
    given = (found.slot_B, found.length_B, found.room_B, found.stop_BS, *told)
    kept = (book.tokens_CW, book.length_C, book.finish_C)
    assert all(x.is_contiguous() for x in (*given, *kept, draft.end_BR, draft.live_B))
    assert value_CP is None or value_CP.is_contiguous()
    sizes = [_WIDE * batch * (levels + 4), _REAL * batch * gains, _FLAGS * batch]
    block = torch.empty(sum(sizes), dtype=torch.uint8, device=found.slot_B.device)
    number_N, gain_N, flag_N = block.split(sizes)
    number_N, gain_N = number_N.view(torch.int64), gain_N.view(torch.float32)
    _settle[(batch,)](
        *given,
        draft.end_BR,
        draft.live_B,
        *kept,
        value_CP,
        number_N,
        flag_N,
        batch,
        levels,
        draft.end_BR.shape[1],
        found.stop_BS.shape[1],
        book.tokens_CW.shape[1],
        0 if value_CP is None else value_CP.shape[1],
        D=triton.next_power_of_2(levels),
        S=triton.next_power_of_2(found.stop_BS.shape[1]),
        P=_NODES,
        num_warps=4,
    )
    count, accepted, finish, drafted = number_N[batch * levels :].view(4, batch).unbind(0)
    flags = flag_N.view(torch.bool).view(_FLAGS, batch).unbind(0)
    return Settled(
        number_N[: batch * levels].view(batch, levels),
        count,
        accepted,
        finish,
        drafted,
        gain_N.view(batch, gains),
        *flags,
    )


@triton.jit
def _settle(
    slot_ptr,
    length_ptr,
    room_ptr,
    stop_ptr,
    emitted_ptr,
    path_ptr,
    count_ptr,
    accepted_ptr,
    end_ptr,
    live_ptr,
    tokens_ptr,
    lengths_ptr,
    finish_ptr,
    value_ptr,
    number_ptr,
    flag_ptr,
    batch,
    levels,
    rows,
    stops,
    width,
    pool,
    D: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
):
    b = tl.program_id(0)
    slot = tl.load(slot_ptr + b)
    length = tl.load(length_ptr + b)
    room = tl.load(room_ptr + b)
    most = tl.load(count_ptr + b)
    accepted = tl.load(accepted_ptr + b)

    d_D = tl.arange(0, D)
    s_S = tl.arange(0, S)
    token_D = tl.load(emitted_ptr + b * levels + d_D, mask=d_D < levels, other=0)
    stop_S = tl.load(stop_ptr + b * stops + s_S, mask=s_S < stops, other=-1)
    same_DS = (token_D[:, None] == stop_S[None, :]) & (s_S < stops)[None, :]
    is_stop_D = tl.max(same_DS.to(tl.int32), 1) > 0
    within = tl.minimum(most, room)
    never = levels + 1
    first_D = tl.where(is_stop_D & (d_D < levels) & (d_D + 1 <= within), d_D + 1, never)
    first = tl.min(first_D, 0)
    ended = tl.where(first < never, _STOP, tl.where(within >= room, _LENGTH, 0)).to(tl.int64)
    count = tl.minimum(first, within)

    # the requests of one slot, the dummy's, all write the same: they keep nothing
    tl.store(tokens_ptr + slot * width + length + 1 + d_D, token_D, mask=d_D < count)
    tl.store(lengths_ptr + slot, length + count)
    tl.store(finish_ptr + slot, tl.maximum(tl.load(finish_ptr + slot), ended))

    tl.store(number_ptr + b * levels + d_D, token_D, mask=d_D < levels)
    number_ptr += batch * levels + b
    tl.store(number_ptr, count.to(tl.int64))
    tl.store(number_ptr + batch, accepted)
    tl.store(number_ptr + 2 * batch, ended)
    tl.store(number_ptr + 3 * batch, tl.load(live_ptr + b) - 1)
    last = tl.load(path_ptr + b * levels + accepted)
    end = tl.load(end_ptr + b * rows + last)
    tl.store(flag_ptr + b, (end > last + 1).to(tl.uint8))
    tl.store(flag_ptr + batch + b, (last != accepted).to(tl.uint8))
    tl.store(flag_ptr + 2 * batch + b, (most <= accepted).to(tl.uint8))

    if value_ptr is not None:
        for start in range(0, pool, P):
            at_P = start + tl.arange(0, P)
            nothing_P = tl.full((P,), float("-inf"), tl.float32)
            tl.store(value_ptr + slot * pool + at_P, nothing_P, mask=at_P < pool)
