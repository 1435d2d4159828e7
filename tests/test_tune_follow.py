"""Heads are followed along recorded answers as they draft along them, and calibrated there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_engine import decoder, ids, tokenizer
from tiny_heads import KINDS, RECURRENT, SMALL_VOCAB, network, unrolled

from furcate.config import DraftOptions
from furcate.drafters.plausible import PRIOR
from furcate.tree.calibration import Calibration
from furcate.tree.origin import Origin
from furcate.tune.calibrate import Subject, agreements, calibrate
from furcate.tune.fit_scales import mean_nll
from furcate.tune.follow import Follower, choices_at, follow, spread_out
from furcate.tune.replay import Replay, Stream

DEPTH = 3
ORIGIN = Origin("here", "now", "2026-12-02", "fitted")


def subject(kind: str, small: bool = False) -> Subject:
    draft = DraftOptions(depth=DEPTH, topk=3)
    return Subject(decoder(), tokenizer(), network(kind, small), draft, roots=4)


def stream(temperature: float, seed: int = 3, tokens: int = 12) -> Stream:
    prompt = ids("hello world, hello")
    rng = torch.Generator().manual_seed(seed)
    answer = torch.randint(3, len(prompt) + 200, (tokens,), generator=rng)
    return Stream(tuple(prompt), tuple(answer.tolist()), temperature, seed)


def replay_of(kind: str, small: bool = False) -> Replay:
    return subject(kind, small).replay(PRIOR, 64)


@pytest.mark.parametrize("kind", RECURRENT)
@torch.inference_mode()
def test_following_is_the_recursion_on_the_true_tokens(kind: str) -> None:
    replay, told = replay_of(kind), stream(0.0)
    drafter: Any = replay.drafter
    for view, next_BD in replay.views(told, 2, 3):
        followed = list(drafter.follow(view, next_BD))
        for b, root in enumerate(view.length_B.tolist()):
            path = [token for token in next_BD[b, :-1].tolist() if token >= 0]
            for level, wanted_V in enumerate(
                unrolled(network(kind), told.tokens[: root + 1], path)
            ):
                found_V = drafter.scores(followed[level][b : b + 1], level)[0]
                torch.testing.assert_close(found_V, wanted_V, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_level_one_is_what_the_drafter_proposes_by(kind: str) -> None:
    replay, told = replay_of(kind, small=True), stream(0.7)
    drafter: Any = replay.drafter
    for view, next_BD in replay.views(told, 0, 5):
        out_BC = next(iter(drafter.follow(view, next_BD)))
        noise_BV = drafter.words.noise(view, 1)[:, 0]
        weight_BV = drafter.plausible.log_weights(
            drafter.scores(out_BC, 0)[:, None], view.law.temperature_B, noise_BV, 1
        )[:, 0]
        best_B = drafter.words.targets(weight_BV.argmax(1))
        assert torch.equal(drafter.propose(view, drafter.depth).tokens_BP[:, 0], best_B)


def test_rows_that_no_tree_leads_to_are_left_out_and_counted() -> None:
    replay = replay_of("mtp", small=True)
    inside, outside = SMALL_VOCAB[5], SMALL_VOCAB[5] + 1
    told = replace(stream(0.0), answer=(inside, inside, outside, inside, inside))
    found = follow(replay, [told], roots=100)
    # of five tokens four are known; two ways of length 2, none of length 3
    assert [len(level.word_N) for level in found.levels] == [4, 2, 0]
    assert found.levels[0].word_N.tolist() == [5] * 4
    assert found.roots == 5 and found.outside == pytest.approx((1 / 5, 1 / 3, 1.0))


def test_choices_hold_the_noise_that_the_verifier_uses() -> None:
    replay, told = replay_of("medusa", small=True), stream(0.7, seed=2**64 - 5)
    drafter = replay.drafter
    assert isinstance(drafter, Follower)
    followed = follow(replay, [told], roots=100)
    (choices,) = choices_at(drafter, followed, 2)
    rows = iter(choices.noise_NV if choices.noise_NV is not None else ())
    for view, next_BD in replay.views(told):
        noise_BDV = drafter.words.noise(view, DEPTH)
        assert noise_BDV is not None
        for b in range(len(next_BD)):
            if all(token in SMALL_VOCAB for token in next_BD[b, :2].tolist()):
                assert torch.equal(next(rows), noise_BDV[b, 1])
    assert next(rows, None) is None


def test_roots_are_spread_over_all_answers() -> None:
    streams = [stream(0.0, tokens=n) for n in (5, 1, 7, 12)]
    taken = spread_out(streams, 8)
    at = [
        before + root
        for (each, first, every), before in zip(taken, (0, 5, 6, 13), strict=True)
        for root in range(first, len(each.answer), every)
    ]
    assert at == list(range(0, 25, 3))


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_calibrated_head_expects_what_is_accepted(kind: str) -> None:
    streams = [stream(t, seed, 30) for seed in range(4) for t in (0.0, 1.0)]
    told: list[str] = []
    found = calibrate(subject(kind), streams, 10_000, ORIGIN, tell=told.append)
    assert [fit.after <= fit.before for fit in found.scales] == [True] * DEPTH
    assert len(found.calibration.scales) == DEPTH and told[0] == "following the answers"
    assert found.roots == sum(len(each.answer) for each in streams)
    assert Calibration.from_dict(found.calibration.to_dict()) == found.calibration
    assert found.to_json()["depths"][0]["rows"] == found.scales[0].rows
    for each in agreements(subject(kind), streams, 10_000, found.calibration):
        # random answers are hardly ever guessed: fewer than one node in fifty
        assert abs(each.expected - each.accepted) < 0.02


def test_another_calibration_is_less_likely() -> None:
    replay = replay_of("eagle3")
    drafter = replay.drafter
    assert isinstance(drafter, Follower)
    followed = follow(replay, [stream(1.0, tokens=40)], 1000)
    found = calibrate(subject("eagle3"), [stream(1.0, tokens=40)], 1000, ORIGIN)
    choices = choices_at(drafter, followed, 1)
    assert mean_nll(choices, found.calibration.scale(1)) < mean_nll(choices, PRIOR.scale(1))
