"""What a drafter gives along the answers' own continuations, to which scales are fitted.

Legend: B roots, N rows of one depth, D levels, C size of what is scored, V draft vocabulary, X
vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.drafters.base import View
from furcate.drafters.medusa import MedusaDrafter
from furcate.drafters.recurrent import RecurrentDrafter
from furcate.tune.fit_scales import Choices
from furcate.tune.replay import Replay, Stream
from furcate.verify.noise import gumbel_noise

__all__ = ["Follower", "Followed", "Level", "choices_at", "follow", "spread_out"]

ROWS = 64  # whose noise is drawn at once
Follower = RecurrentDrafter | MedusaDrafter


@dataclass(frozen=True, slots=True)
class Level:
    """Rows of one depth at which the drafter could have said what the target chose."""

    out_NC: Tensor  # what the drafter gave there
    word_N: Tensor  # int64, draft id of the target's choice
    temperature_N: Tensor  # float32
    seed_N: Tensor  # int64, bit pattern
    position_N: Tensor  # int64, of the chosen token


@dataclass(frozen=True, slots=True)
class Followed:
    """The levels of all roots, depth 1 first."""

    levels: tuple[Level, ...]
    roots: int
    outside: tuple[float, ...]  # share of choices at each depth that the drafter has no id for


@torch.inference_mode()
def follow(replay: Replay, streams: Sequence[Stream], roots: int) -> Followed:
    """Feed a drafter with the true tokens below about `roots` roots of the streams.

    A root counts at a depth if the answer goes that far and the drafter knows all tokens on the
    way: no tree leads to the others.
    """
    drafter = replay.drafter
    assert isinstance(drafter, Follower)
    word_X = _word_of(drafter, replay.target.decoder.spec.vocab_size, replay.device)
    parts: list[list[Level]] = [[] for _ in range(drafter.depth)]
    outside, due, seen = [0] * drafter.depth, [0] * drafter.depth, 0
    for stream, first, every in spread_out(streams, roots):
        for view, next_BD in replay.views(stream, first, every):
            word_BD = torch.where(next_BD < 0, -1, word_X[next_BD.clamp_min(0)])
            known_BD = (word_BD >= 0).cumprod(1).bool()
            for level, out_BC in enumerate(drafter.follow(view, next_BD)):
                reached_B = next_BD[:, level] >= 0
                if level:
                    reached_B &= known_BD[:, level - 1]
                due[level] += int(reached_B.sum())
                outside[level] += int((reached_B & ~known_BD[:, level]).sum())
                rows = _Rows(view, out_BC, word_BD[:, level], level)
                parts[level].append(rows.kept(known_BD[:, level]))
            seen += len(view.length_B)
    shares = tuple(lost / max(1, all_) for lost, all_ in zip(outside, due, strict=True))
    return Followed(tuple(_joined(each) for each in parts), seen, shares)


def spread_out(streams: Sequence[Stream], roots: int) -> list[tuple[Stream, int, int]]:
    """(stream, first root, stride) so that about `roots` are taken, evenly over all answers."""
    every = max(1, sum(len(stream.answer) for stream in streams) // max(1, roots))
    taken, passed = [], 0
    for stream in streams:
        taken.append((stream, -passed % every, every))
        passed += len(stream.answer)
    return taken


@torch.inference_mode()
def choices_at(drafter: Follower, followed: Followed, depth: int) -> list[Choices]:
    """Scores, noise and choices of the rows at `depth`, 1 for the root's children.

    One entry for each temperature; they hold 8 bytes for each row and draft token.
    """
    level = followed.levels[depth - 1]
    found = []
    for temperature in sorted(set(level.temperature_N.tolist())):
        at_N = (level.temperature_N == temperature).nonzero()[:, 0]
        logits_NV = drafter.scores(level.out_NC[at_N], depth - 1).float()
        noise_NV = _noise(drafter, level, at_N) if temperature > 0 else None
        found.append(Choices(logits_NV, noise_NV, level.word_N[at_N], temperature))
    return found


@dataclass(frozen=True, slots=True)
class _Rows:
    """All rows of one batch at one level."""

    view: View
    out_BC: Tensor
    word_B: Tensor
    level: int

    def kept(self, known_B: Tensor) -> Level:
        law = self.view.law
        return Level(
            self.out_BC[known_B],
            self.word_B[known_B],
            law.temperature_B[known_B],
            law.seed_B[known_B],
            self.view.length_B[known_B] + self.level + 1,
        )


def _joined(parts: Sequence[Level]) -> Level:
    names = ("out_NC", "word_N", "temperature_N", "seed_N", "position_N")
    return Level(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def _word_of(drafter: Follower, vocab: int, device: torch.device) -> Tensor:
    """Draft id of each of the target's tokens, int64 [X]; -1 where there is none."""
    word_V = torch.arange(drafter.words.size, device=device)
    none_X = torch.full((vocab,), -1, device=device)
    return none_X.scatter(0, drafter.words.targets(word_V), word_V)


def _noise(drafter: Follower, level: Level, at_N: Tensor) -> Tensor:
    """The target's noise at the draft's tokens, float32 [N, V]."""
    token_V = drafter.words.targets(torch.arange(drafter.words.size, device=at_N.device))
    reach = 1 + int(token_V.max())
    parts = [
        gumbel_noise(level.seed_N[rows], level.position_N[rows, None], rows * 0, reach)[:, 0][
            :, token_V
        ]
        for rows in torch.split(at_N, ROWS)
    ]
    return torch.cat(parts)
