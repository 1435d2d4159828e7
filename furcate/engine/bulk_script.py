"""What is to be written in bulk, and the tape on which a row of the batch finds it.

Legend: F entries of a tape, S tokens of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from furcate.errors import BadRequest

__all__ = ["END", "SAMPLE", "Limits", "Script", "Span", "Stage", "Tape", "Written", "check_token"]

SAMPLE, END = -1, -2


@dataclass(frozen=True, slots=True)
class Stage:
    """Tokens that are fed, then sampling until a stop id or `most` tokens."""

    feed: tuple[int, ...]
    temperature: float  # 0: greedy
    most: int  # a stop id counts


@dataclass(frozen=True, slots=True)
class Script:
    """Stages that follow one another in one sequence, and the seed of its noise.

    A stage that `most` ends is closed with a fed stop id if another stage follows.
    """

    stages: tuple[Stage, ...]
    seed: int  # 0..2**64 - 1


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) were sampled in this stage, the stop id included."""

    start: int
    end: int
    stage: int


@dataclass(frozen=True, slots=True)
class Written:
    """A finished sequence; its spans are in order, one for every stage that was reached."""

    tokens: list[int]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a script must keep to."""

    vocab: int
    context: int  # most tokens of a sequence
    stop_ids: tuple[int, ...]  # the first one closes a stage that ended without


@dataclass(frozen=True, slots=True)
class Tape:
    """A script as a row plays it. An entry is a token to feed, SAMPLE or END.

    A row stays at SAMPLE while the stage lasts. Behind SAMPLE stands the stop id that closes the
    stage; a row that has sampled one itself skips it.
    """

    entry_F: NDArray[np.int64]
    temperature_F: NDArray[np.float32]  # at SAMPLE, else 0
    most_F: NDArray[np.int64]  # at SAMPLE, else 0
    seed: int  # as the signed 64-bit integer of the same bits

    @staticmethod
    def of(script: Script, limits: Limits) -> Tape:
        """Raises BadRequest for a script that cannot be played."""
        _check(script, limits)
        entries: list[int] = []
        for stage in script.stages:
            entries += [*stage.feed, SAMPLE, limits.stop_ids[0]]
        # every entry takes a position but a skipped one, so that no row gets further than this
        entry_F = np.array([*entries[: 2 * limits.context], END, END], np.int64)
        entry_F[len(entries) - 1 :] = END  # the last stage is not closed
        at = np.flatnonzero(entry_F == SAMPLE)
        stages = script.stages[: len(at)]
        temperature_F, most_F = np.zeros(len(entry_F), np.float32), np.zeros_like(entry_F)
        temperature_F[at] = [stage.temperature for stage in stages]
        most_F[at] = [stage.most for stage in stages]
        seed = script.seed - (1 << 64) if script.seed >= 1 << 63 else script.seed
        return Tape(entry_F, temperature_F, most_F, seed)

    def written(self, token_S: NDArray[np.int64], entry_S: NDArray[np.int64]) -> Written:
        """The sequence, from its tokens and the number of the entry that each came from."""
        sampled_S = np.flatnonzero(self.entry_F[entry_S] == SAMPLE)
        at, first, count = np.unique(entry_S[sampled_S], return_index=True, return_counts=True)
        stage = np.searchsorted(np.flatnonzero(self.entry_F == SAMPLE), at)
        start = sampled_S[first]
        spans = zip(start.tolist(), (start + count).tolist(), stage.tolist(), strict=True)
        return Written(token_S.tolist(), tuple(Span(*span) for span in spans))


def _check(script: Script, limits: Limits) -> None:
    if not script.stages or not script.stages[0].feed:
        raise BadRequest("the first stage must feed a token", field="script", value=script)
    if not 0 <= script.seed < 1 << 64:
        raise BadRequest("must be 0 to 2**64 - 1", field="script.seed", value=script.seed)
    for stage in script.stages:
        if stage.most < 1:
            raise BadRequest("must be at least 1", field="stage.most", value=stage.most)
        if not 0 <= stage.temperature < float("inf"):
            what = "must be 0 or more, and finite"
            raise BadRequest(what, field="stage.temperature", value=stage.temperature)
        for token in stage.feed:
            check_token(token, limits.vocab, "stage.feed")


def check_token(token: int, vocab: int, field: str) -> None:
    """Raises BadRequest for an id that the model does not have."""
    if not 0 <= token < vocab:
        raise BadRequest(f"token ids are 0 to {vocab - 1}", field=field, value=token)
