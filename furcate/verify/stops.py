"""Cut a verdict at the first stop id and at the room that is left, and commit it, on the device.

Legend: B requests, D levels, S stop ids, C slots, P pool nodes, N nodes of the next proposal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from furcate.kernels.draft import Draft, Verdict
from furcate.kernels.entries import Book, Entries
from furcate.kernels.ledger import Settled

__all__ = ["Cut", "Finish", "settle", "truncate"]


class Finish(IntEnum):
    """Why a request is at its end; the values of `Cut.finish_B`."""

    NOT = 0
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class Cut:
    """A verdict whose `count` ends at a stop id or where the room does."""

    verdict: Verdict
    finish_B: Tensor  # int64, a Finish


def truncate(verdict: Verdict, stop_BS: Tensor, room_B: Tensor) -> Cut:
    """Decide where the emitted tokens end.

    A stop id that still fits ends the request with STOP, the id included, also where it fills the
    room exactly. One beyond the room was never emitted: the request ends with LENGTH. min_tokens
    needs no word here, since it bars stop ids from being chosen.

    Args:
        verdict: of a round.
        stop_BS: int64, ids that end a request.
        room_B: int64, tokens that may still be emitted, at least 0.
    """
    is_stop_BD = (verdict.emitted_BD[:, :, None] == stop_BS[:, None, :]).any(-1)
    step_D = torch.arange(1, is_stop_BD.shape[1] + 1, device=is_stop_BD.device)
    count_B1 = torch.minimum(verdict.count_B, room_B)[:, None]
    stops_BD = is_stop_BD & (step_D <= count_B1)
    never = len(step_D) + 1
    first_B = torch.where(stops_BD, step_D, never).amin(-1)
    stopped_B, full_B = first_B < never, count_B1[:, 0] >= room_B
    finish_B = torch.where(
        stopped_B, int(Finish.STOP), torch.where(full_B, int(Finish.LENGTH), int(Finish.NOT))
    )
    count_B = torch.minimum(first_B, count_B1[:, 0])
    return Cut(replace(verdict, count_B=count_B), finish_B)


def settle(
    book: Book,
    found: Entries,
    draft: Draft,
    verdict: Verdict,
    value_CP: Tensor | None = None,
    gains: int = 0,
) -> Settled:
    """Append the emitted tokens up to where they end, and move the lengths; the torch reference.

    See `furcate.kernels.ledger.Settle`. What is not kept goes to the book's last column.
    """
    cut = truncate(verdict, found.stop_BS, found.room_B)
    _write(book, found, cut)
    if value_CP is not None:
        # not by assignment: a number put at indices is first copied from the host
        value_CP.index_fill_(0, found.slot_B, -torch.inf)
    last_B1 = verdict.path_BD.gather(1, verdict.accepted_B[:, None])
    return Settled(
        tokens_BD=verdict.emitted_BD,
        count_B=cut.verdict.count_B,
        accepted_B=verdict.accepted_B,
        finish_B=cut.finish_B,
        drafted_B=draft.live_B - 1,
        gain_BN=torch.empty(len(last_B1), gains, device=last_B1.device),
        offered_B=(draft.end_BR.gather(1, last_B1) > last_B1 + 1)[:, 0],
        strayed_B=last_B1[:, 0] != verdict.accepted_B,
        broken_B=verdict.count_B <= verdict.accepted_B,
    )


def _write(book: Book, found: Entries, cut: Cut) -> None:
    slot_B, emitted_BD, count_B = found.slot_B, cut.verdict.emitted_BD, cut.verdict.count_B
    level_D = torch.arange(emitted_BD.shape[1], device=slot_B.device)
    kept_BD = level_D < count_B[:, None]
    trash = book.tokens_CW.shape[1] - 1
    place_BD = torch.where(kept_BD, found.length_B[:, None] + 1 + level_D, trash)
    book.tokens_CW[slot_B[:, None], place_BD] = emitted_BD
    book.length_C[slot_B] = found.length_B + count_B
    book.finish_C[slot_B] = torch.maximum(book.finish_C[slot_B], cut.finish_B)
