"""Calibrates a head on recorded answers: first its scales, then the map of its nodes' values.

Legend: B roots, P pool nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from furcate.config import DraftOptions, EngineOptions
from furcate.drafters.around import around_head
from furcate.drafters.draft_cache import Room
from furcate.drafters.plausible import PRIOR
from furcate.engine.build import build
from furcate.heads.places import Head
from furcate.kernels.backend import kernels_of
from furcate.kernels.select import ranks
from furcate.models.decoder import Decoder
from furcate.text.tokenizer import Tokenizer
from furcate.tree.calibration import Calibration, DepthScale, ValueMap
from furcate.tree.origin import Origin
from furcate.tune.fit_scales import ScaleFit, fit_scale
from furcate.tune.fit_values import Tally, fit_values
from furcate.tune.follow import Followed, Follower, choices_at, follow, spread_out
from furcate.tune.path_ranks import on_path
from furcate.tune.replay import Replay, Stream

__all__ = ["Agreement", "Calibrated", "Subject", "agreements", "calibrate"]

PAGE = 16
NODES = (16, 63)  # trees for which expected and accepted nodes are set side by side
SCALE_ROOTS = 2048


@dataclass(frozen=True, slots=True)
class Subject:
    """A head on its target, and how its trees grow while it is looked at."""

    decoder: Decoder
    tokenizer: Tokenizer
    head: Head
    draft: DraftOptions
    roots: int = 16  # of one pass

    def replay(self, fitted: Calibration, longest: int) -> Replay:
        """Its drafter with a calibration, over streams of at most `longest` tokens."""
        pages = max(4, -(-(longest + 1) // PAGE))
        device = self.decoder.device
        options = EngineOptions(
            device=str(device),
            max_batch=self.roots,
            page_size=PAGE,
            kv_tokens=pages * PAGE,
            prefill_chunk=pages * PAGE,
        )
        room = Room(
            capacity=self.roots,
            pages=pages,
            page_size=PAGE,
            vocab=self.decoder.spec.vocab_size,
            device=device,
            kernels=kernels_of(device),
        )
        drafter = around_head(self.head, self.draft, room, fitted)
        return Replay(build(self.decoder, self.tokenizer, drafter, options, self.draft))


@dataclass(frozen=True, slots=True)
class Agreement:
    """Accepted nodes of the mean root, and how many the values had promised."""

    temperature: float
    nodes: int
    unmapped: float  # promised by the scales alone
    expected: float
    accepted: float


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A calibration and what it rests on."""

    calibration: Calibration
    scales: tuple[ScaleFit, ...]
    outside: tuple[float, ...]  # share of choices at each depth that the head has no id for
    roots: int  # of the map
    agreements: tuple[Agreement, ...]

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        levels = zip(self.scales, self.outside, strict=True)
        return {
            "depths": [
                {
                    "beta": fit.scale.beta,
                    "sigma": fit.scale.sigma,
                    "floor": fit.scale.floor,
                    "rows": fit.rows,
                    "nll_before": fit.before if fit.rows else None,
                    "nll_after": fit.after if fit.rows else None,
                    "outside": outside,
                }
                for fit, outside in levels
            ],
            "values": [
                list(self.calibration.values.estimated),
                list(self.calibration.values.empirical),
            ],
            "roots": self.roots,
            "agreement": [
                {name: getattr(each, name) for name in Agreement.__slots__}
                for each in self.agreements
            ],
        }


def calibrate(
    subject: Subject,
    streams: Sequence[Stream],
    roots: int,
    origin: Origin,
    *,
    now: Calibration = PRIOR,
    tell: Callable[[str], None] = lambda _: None,
) -> Calibrated:
    """Fit a head's scales on some roots of the streams, and the map of its values on `roots`.

    Args:
        now: what the head has so far; fits are set beside it, and do not depend on it.
        tell: is told what is done next.
    """
    longest = max(len(stream.tokens) for stream in streams)
    tell("following the answers")
    replay = subject.replay(now, longest)
    followed = follow(replay, streams, min(roots, SCALE_ROOTS))
    fits = _fits(replay, followed, now, tell)
    fitted = Calibration(tuple(fit.scale for fit in fits), origin=origin)
    tell("growing trees")
    tallies = _tallies(subject.replay(fitted, longest), streams, roots)
    values = fit_values(tallies.every, tallies.roots)
    return Calibrated(
        calibration=replace(fitted, values=values),
        scales=fits,
        outside=followed.outside,
        roots=tallies.roots,
        agreements=tallies.agreements(values),
    )


def agreements(
    subject: Subject, streams: Sequence[Stream], roots: int, fitted: Calibration
) -> tuple[Agreement, ...]:
    """What trees promise under a calibration, and what is accepted: a check on other streams."""
    longest = max(len(stream.tokens) for stream in streams)
    tallies = _tallies(subject.replay(fitted, longest), streams, roots)
    return tallies.agreements(Calibration().values)


def _fits(
    replay: Replay, followed: Followed, now: Calibration, tell: Callable[[str], None]
) -> tuple[ScaleFit, ...]:
    """Depth by depth, each search starting from the depth above."""
    drafter = replay.drafter
    assert isinstance(drafter, Follower)
    fits: list[ScaleFit] = []
    start: DepthScale = PRIOR.scale(1)
    for depth in range(1, drafter.depth + 1):
        tell(f"fitting depth {depth} of {drafter.depth}")
        fits.append(fit_scale(choices_at(drafter, followed, depth), now.scale(depth), start))
        start = fits[-1].scale
    return tuple(fits)


@dataclass(slots=True)
class _Tallies:
    """Nodes of all pools, and of the trees cut from them by temperature and size."""

    every: Tally
    trees: dict[tuple[float, int], Tally]
    counts: dict[float, int]  # roots

    @property
    def roots(self) -> int:
        return sum(self.counts.values())

    def agreements(self, values: ValueMap) -> tuple[Agreement, ...]:
        unmapped = Calibration().values
        return tuple(
            Agreement(
                temperature,
                nodes,
                tally.expected(unmapped) / self.counts[temperature],
                tally.expected(values) / self.counts[temperature],
                tally.accepted / self.counts[temperature],
            )
            for (temperature, nodes), tally in self.trees.items()
        )


@torch.inference_mode()
def _tallies(replay: Replay, streams: Sequence[Stream], roots: int) -> _Tallies:
    tallies = _Tallies(Tally.empty(), {}, {})
    for stream, first, every in spread_out(streams, roots):
        at = stream.temperature
        for view, next_BD in replay.views(stream, first, every):
            proposal = replay.drafter.propose(view, replay.drafter.depths[-1])
            on_BP, value_BP = on_path(proposal, next_BD), proposal.value_BP
            rank_BP = ranks(value_BP, proposal.depth_BP)
            tallies.every.add(value_BP.flatten(), on_BP.flatten())
            tallies.counts[at] = tallies.counts.get(at, 0) + len(on_BP)
            for nodes in NODES:
                in_tree_BP = rank_BP < nodes
                tally = tallies.trees.setdefault((at, nodes), Tally.empty())
                tally.add(value_BP[in_tree_BP], on_BP[in_tree_BP])
    return tallies
