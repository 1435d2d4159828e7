"""What a round of some size costs, measured with nobody in it."""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise

import torch

from furcate.engine.player import Outcome, Player
from furcate.engine.round import Batch
from furcate.engine.state import State
from furcate.verify.law import Needs

__all__ = ["nobody", "seconds_of"]

ROUNDS = 3  # that are timed; the first one only warms up


def nobody(
    state: State, requests: int, rows: int, needs: Needs, *, levels: int, most: int
) -> Batch:
    """A round of `rows` rows in total on the scratch page, at most `most` for each dummy.

    Fewer where there are not as many slots as requests.
    """
    players = min(requests, state.shape.capacity)
    each = min(rows // players, most)
    return Batch(
        slot_B=torch.tensor([state.dummy] * players),
        allowance_B=torch.tensor([each] * players),
        rows=each,
        columns=each + 1,
        needs=needs,
        levels=levels,
    )


@torch.inference_mode()
def seconds_of(player: Player, batch: Batch) -> float:
    """Seconds from the end of a round to that of the next, where one follows the other."""
    outcomes = deque[Outcome]()
    ends: list[float] = []
    for n in range(ROUNDS + player.ahead):
        outcomes.append(player.launch(batch))
        if n >= player.ahead:
            outcomes.popleft()()
            ends.append(time.perf_counter())
    for outcome in outcomes:
        outcome()
    return min(end - before for before, end in pairwise(ends))
