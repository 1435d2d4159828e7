"""Cut a verdict at the first stop id and at the room that is left, on the device.

Legend: B requests, D levels, S stop ids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from furcate.kernels.draft import Verdict
from furcate.verify.law import Law

__all__ = ["Cut", "Finish", "truncate"]


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


def truncate(verdict: Verdict, law: Law, room_B: Tensor) -> Cut:
    """Decide where the emitted tokens end.

    A stop id that still fits ends the request with STOP, the id included, also where it fills the
    room exactly. One beyond the room was never emitted: the request ends with LENGTH. min_tokens
    needs no word here, since it bars stop ids from being chosen.

    Args:
        verdict: of a round.
        law: its `stop_BS` are the ids that end a request.
        room_B: int64, tokens that may still be emitted, at least 0.
    """
    is_stop_BD = (verdict.emitted_BD[:, :, None] == law.stop_BS[:, None, :]).any(-1)
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
