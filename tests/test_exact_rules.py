"""Every rule gives the target's law, by exact enumeration in float64, to 1e-12."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from enumeration import (
    ExactCoins,
    Outcome,
    Path,
    Toy,
    distance,
    outcomes,
)
from exact_cases import (
    BINARY,
    DEEP,
    DRAFTER,
    DRAFTS,
    EDGES,
    EXACT,
    FULL_DRAFTER,
    ONE,
    SPARSE,
    TARGET,
    Recursive,
    Stuck,
    block_round,
    coupled,
    impossible_tokens,
    keyed_by_round,
    play_block,
    recursive_round,
    several_rounds,
)

from furcate.verify.coins import Coins, RoundCoins, draw_at
from furcate.verify.noise import ACCEPT, BONUS, DRAFT, RESIDUAL


@pytest.mark.parametrize("target", [TARGET, SPARSE], ids=["full", "sparse"])
@pytest.mark.parametrize("name", DRAFTS)
def test_the_coupled_rule_gives_the_targets_law(name: str, target: Toy) -> None:
    for by_words in (False, True):
        assert distance(coupled(DRAFTS[name], target, by_words=by_words), target, 4) <= EXACT


@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
@pytest.mark.parametrize("target", [TARGET, SPARSE], ids=["full", "sparse"])
def test_recursive_rejection_gives_the_targets_law(target: Toy, replacement: bool) -> None:
    rule = Recursive(shape=DEEP, drafter=DRAFTER, target=target, replacement=replacement)
    assert rule.distance(steps=4) <= EXACT


@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
def test_recursive_rejection_with_more_siblings_than_the_law_has_tokens(replacement: bool) -> None:
    rule = Recursive(shape=((), (), (), ()), drafter=DRAFTER, replacement=replacement)
    assert rule.distance(steps=1) <= EXACT


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("target", [TARGET, SPARSE, DRAFTER], ids=["full", "sparse", "alike"])
def test_block_verification_gives_the_targets_law(target: Toy, gamma: int) -> None:
    def play(exact: ExactCoins) -> Path:
        return play_block(target, DRAFTER, gamma, exact.round(0))

    assert distance(outcomes(play), target, gamma + 1) <= EXACT


def test_block_verification_accepts_more_than_one_by_one() -> None:
    def by_block(exact: ExactCoins) -> Path:
        return play_block(TARGET, FULL_DRAFTER, 3, exact.round(0))

    def length(plays: Iterator[Outcome]) -> float:
        return sum(weight * len(tokens) for weight, tokens in plays)

    chain = Recursive(shape=((ONE,),))
    assert length(outcomes(by_block)) > length(outcomes(chain.play)) + 0.01


@pytest.mark.parametrize("one_round", [block_round, recursive_round], ids=["block", "recursive"])
def test_the_joint_law_holds_across_rounds(one_round: Callable[[Coins, Path], Path]) -> None:
    play = several_rounds(one_round, keyed_by_round)
    assert distance(outcomes(play), BINARY, 3) <= EXACT


@pytest.mark.parametrize("coin", EDGES)
def test_no_coin_makes_a_rule_emit_an_impossible_token(coin: float) -> None:
    assert impossible_tokens(Stuck(coin)) == 0


@pytest.mark.parametrize("coin", EDGES)
@pytest.mark.parametrize("law", [[0.0, 0.5, 0.0, 0.5, 0.0], [1.0, 0.0], [0.0, 1.0], [1e-300, 0.0]])
def test_no_coin_draws_an_impossible_token(coin: float, law: list[float]) -> None:
    assert law[draw_at(torch.tensor(law, dtype=torch.float64), coin)] > 0


def test_coins_of_a_round_are_reproducible_and_differ_by_name() -> None:
    law_V = torch.full((1000,), 1e-3, dtype=torch.float64)
    names = [(s, i) for s in (DRAFT, ACCEPT, RESIDUAL, BONUS) for i in range(6)]
    keys = [(1, 5, 0), (2, 5, 0), (1, 6, 0), (1, 5, 1), (2**63 + 1, 5, 0)]
    drawn = [[RoundCoins(*key).draw(*name, law_V) for name in names] for key in keys]
    assert drawn[0] == [RoundCoins(1, 5).draw(*name, law_V) for name in names]
    assert len({tuple(row) for row in drawn}) == len(keys)
    assert len(set(drawn[0])) > 20
