"""A drafter that is hardly ever right is told of once; one that does not pay is not."""

from __future__ import annotations

import warnings

import pytest
from tiny_engine import prompt_of, tiny_engine
from tiny_heads import around, network

from furcate.config import SamplingParams
from furcate.engine.watch import ROUNDS, Watch


def watched(drafted: int, tokens: int, *, active: bool = True) -> Watch:
    watch = Watch(active=active)
    for _ in range(ROUNDS):
        watch.note(drafted, tokens)
    return watch


def test_drafts_that_are_never_right_are_told_of_once() -> None:
    watch = watched(drafted=15, tokens=1)
    with pytest.warns(UserWarning, match="layers are counted"):
        watch.warn()
    for _ in range(ROUNDS):
        watch.note(15, 1)
    with warnings.catch_warnings(action="error"):
        watch.warn()


@pytest.mark.parametrize(
    "watch",
    [
        watched(drafted=15, tokens=2),
        watched(drafted=0, tokens=1),
        watched(drafted=15, tokens=1, active=False),
    ],
    ids=["often right", "nothing drafted", "n-grams"],
)
def test_nothing_is_said_of_others(watch: Watch) -> None:
    with warnings.catch_warnings(action="error"):
        watch.warn()


def test_a_good_drafter_that_rests_nearly_always_is_let_alone() -> None:
    watch = Watch(active=True)
    for n in range(ROUNDS):
        watch.note(15 * (n % 100 == 0), 1 + 2 * (n % 100 == 0))
    with warnings.catch_warnings(action="error"):
        watch.warn()


def test_the_engine_tells_of_a_random_head() -> None:
    asked = SamplingParams(max_tokens=240, temperature=0, ignore_eos=True)
    with (
        tiny_engine(around(network("eagle3"), max_batch=1), max_batch=1) as engine,
        pytest.warns(UserWarning, match="hardly ever right") as told,
    ):
        engine.collect(engine.submit(prompt_of(9), asked))
    assert len(told) == 1
