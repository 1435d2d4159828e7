"""Each known wrong rule is caught by the check that the right ones pass.

The check is `distance`: all coins of a rule are enumerated in float64, and the law of what it emits
is compared with the target's. Right rules must be within 1e-12 (rounding alone stays below 1e-15),
planted wrong ones beyond 1e-4 (the mildest, a draft rounded to bf16, is 2.4e-4 away). Wrong rules
are written out beside the right ones, and where furcate/verify has the mechanism, the same fault is
planted there as well, by a changed line of its source.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as File
from typing import Any

import pytest
import torch
from enumeration import (
    ExactCoins,
    Outcome,
    Path,
    RoundOfCoins,
    Toy,
    distance,
    outcomes,
)
from exact_cases import (
    BINARY,
    DRAFTS,
    EXACT,
    ONE,
    TARGET,
    WRONG,
    P,
    Q,
    Recursive,
    Shape,
    Stuck,
    block_round,
    coupled,
    impossible_tokens,
    several_rounds,
)
from torch import Tensor
from verify_cases import draft_of, path_of

from furcate.kernels.draft import Draft
from furcate.verify import recursive
from furcate.verify.coins import Coins, RoundCoins, residual
from furcate.verify.noise import ACCEPT, BONUS, DRAFT, RESIDUAL
from furcate.verify.recursive import DrawnTree, without


def fresh_draw_on_a_miss(draft: Draft, target: Toy) -> Iterator[Outcome]:
    """The choice decides the walk, but another draw of the target is emitted at its end."""
    for weight, tokens in coupled(draft, target):
        for token, p in enumerate(target.law(tokens[:-1]).tolist()):
            yield weight * p, (*tokens[:-1], token)


def one_draw_per_path(draft: Draft, target: Toy) -> Iterator[Outcome]:
    """fms-extras#12: every path of the tree draws its own choices, the longest match wins."""
    leaves = [i for i in range(int(draft.live_B)) if draft.end_BR[0, i] == i + 1]
    chains = [draft.tokens_BR[0, [0, *path_of(draft, leaf)]].tolist() for leaf in leaves]
    walks = [list(coupled(draft_of(c, [0, *range(len(c) - 1)]), target)) for c in chains]
    for combo in itertools.product(*walks):
        weight = 1.0
        for w, _ in combo:
            weight *= w
        yield weight, max((tokens for _, tokens in combo), key=len)


def cumulative_walk(tokens: Sequence[int], target: Toy) -> Callable[[ExactCoins], Path]:
    """The inverse-CDF form of matching: one coin walks the siblings' cumulative probability."""

    def play(exact: ExactCoins) -> Path:
        coins, law_V, passed = exact.round(0), target.law(()), 0.0
        for token in tokens:
            passed += float(law_V[token])
            if coins.below(ACCEPT, 0, passed):
                return (token,)
        rest_V = law_V.clone()
        rest_V[list(tokens)] = 0
        return (coins.draw(RESIDUAL, 0, rest_V),)

    return play


@dataclass(frozen=True)
class Judge:
    """`recursive.verify` in pieces, so that a wrong piece can be planted."""

    ratio: Callable[[Tensor, Tensor, int], float] = lambda p, q, x: float(p[x] / q[x])
    left: Callable[[Tensor, Tensor, int], Tensor] = lambda p, q, _: residual(p, q)
    narrow: Callable[[Tensor, int], Tensor] = field(default=without)

    def __call__(self, tree: DrawnTree, target_NV: Tensor, coins: Coins) -> list[int]:
        node, kept = 0, list[int]()
        while True:
            law_V, draft_V = target_NV[node], tree.draft_NV[node]
            for child in tree.children(node):
                token = tree.tokens[child]
                if coins.below(ACCEPT, child, self.ratio(law_V, draft_V, token)):
                    break
                law_V = self.left(law_V, draft_V, token)
                if not tree.replacement:
                    draft_V = self.narrow(draft_V, token)
            else:
                stream = RESIDUAL if tree.children(node) else BONUS
                return [*kept, coins.draw(stream, node, law_V)]
            node = child
            kept.append(token)


@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
def test_the_judge_that_mutants_are_made_of_is_right_itself(replacement: bool) -> None:
    assert Recursive(verify=Judge(), replacement=replacement).distance() <= EXACT


def top_children(law_V: Tensor, count: int, first: int, coins: Coins, **_: object) -> list[int]:
    return law_V.topk(count).indices.tolist()


def one_point(p_V: Tensor, q_V: Tensor, token: int) -> Tensor:
    """The residual of a child that was certain: delete it."""
    return without(p_V, token)


def test_children_by_rank_are_right_if_tested_as_certain() -> None:
    judge = Judge(ratio=lambda p, q, x: float(p[x]), left=one_point)
    assert Recursive(verify=judge, draw=top_children).distance() <= EXACT


def subtract_at_the_token_only(p_V: Tensor, q_V: Tensor, token: int) -> Tensor:
    return residual(p_V, torch.where(torch.arange(len(q_V)) == token, q_V, 0.0))


def not_renormalised(law_V: Tensor, token: int) -> Tensor:
    rest_V = law_V.clone()
    rest_V[token] = 0
    return rest_V


def prune_by_value(tree: DrawnTree) -> DrawnTree:
    """Drop leaves that the drafter found unlikely."""
    inner = set(tree.parent)
    keep = [
        n
        for n in range(len(tree.tokens))
        if n in inner or float(tree.draft_NV[tree.parent[n]][tree.tokens[n]]) > 0.3
    ]
    return DrawnTree(
        tuple(tree.tokens[n] for n in keep),
        tuple(keep.index(tree.parent[n]) if n else -1 for n in keep),
        tree.draft_NV[keep],
        tree.replacement,
    )


def stale_draft(p_V: Tensor, q_V: Tensor, token: int) -> Tensor:
    """The residual subtracts whatever the memory held: here q in another order."""
    return residual(p_V, q_V.flip(0))


def relaxed(p_V: Tensor, q_V: Tensor, token: int) -> float:
    """A threshold below 1 makes acceptance likelier than the ratio."""
    return float(p_V[token] / q_V[token]) / 0.7


def typical(p_V: Tensor, q_V: Tensor, token: int) -> float:
    """Medusa's typical acceptance: p > min(epsilon, delta * exp(-entropy))."""
    entropy = float(torch.special.entr(p_V).sum())
    return float(p_V[token] > min(0.3, 0.55 * torch.tensor(-entropy).exp().item()))


@dataclass(frozen=True)
class Renamed:
    """Coins in which one name stands for another."""

    inner: Coins
    rename: Callable[[int, int], tuple[int, int]]

    def below(self, stream: int, index: int, probability: float) -> bool:
        return self.inner.below(*self.rename(stream, index), probability)

    def draw(self, stream: int, index: int, law_V: Tensor) -> int:
        return self.inner.draw(*self.rename(stream, index), law_V)


def shared(first: int, second: int, shift: int) -> Callable[[Coins], Coins]:
    """`first`'s coin of node n is `second`'s coin of node n + shift."""

    def rename(stream: int, index: int) -> tuple[int, int]:
        return (second, index + shift) if stream == first else (stream, index)

    return lambda coins: Renamed(coins, rename)


SIBLINGS: Shape = ((), ())
RIGHT = Recursive(target=P, drafter=Q, shape=SIBLINGS)
RIGHT_CHAIN = replace(RIGHT, shape=ONE)
WRONG_RECURSIVE = {
    "argmax draft, ratio test with softmax q": replace(RIGHT_CHAIN, draw=top_children),
    "top-k siblings, ratio test with softmax q": replace(RIGHT, draw=top_children),
    "residual subtracts q only at x": replace(RIGHT, verify=Judge(left=subtract_at_the_token_only)),
    "no replacement, q not renormalised": replace(
        RIGHT, verify=Judge(narrow=not_renormalised), replacement=False
    ),
    "pruning by own value": replace(RIGHT, prune=prune_by_value),
    "rejected coin reused": replace(RIGHT_CHAIN, coins=shared(RESIDUAL, ACCEPT, 1)),
    "uninitialised draft probabilities": replace(RIGHT, verify=Judge(left=stale_draft)),
    "relaxed threshold": replace(RIGHT, verify=Judge(ratio=relaxed)),
    "typical acceptance": replace(RIGHT, verify=Judge(ratio=typical)),
    "residual drawn with the draft's noise": replace(RIGHT_CHAIN, coins=shared(RESIDUAL, DRAFT, 1)),
    "draft drawn in bf16": replace(RIGHT, drawn_from=lambda law_V: law_V.bfloat16().double()),
}


class KeyedByPosition(RoundOfCoins):
    """A coin's name is the position that it decides, so that the next round meets it again."""

    def name(self, stream: int, index: int) -> tuple[int, ...]:
        return (stream, self.root + index)


def position_keyed_block() -> float:
    return distance(outcomes(several_rounds(block_round, KeyedByPosition)), BINARY, 3)


class AtMost(Stuck):
    """sglang#35771: coin <= probability."""

    def below(self, stream: int, index: int, probability: float) -> bool:
        return self.value <= probability


@dataclass(frozen=True)
class AnsweredBy:
    """The violation is planted, or its absence shown, by a test elsewhere."""

    file: str
    function: str


@dataclass(frozen=True)
class CannotHappen:
    reason: str


# Violations found in public engines: the distance the check reports, or what answers them.
KNOWN_VIOLATIONS: dict[str, Callable[[], float] | AnsweredBy | CannotHappen] = {
    "argmax draft + ratio test with softmax q": WRONG_RECURSIVE[
        "argmax draft, ratio test with softmax q"
    ].distance,
    "top-k siblings + SpecInfer RRS with softmax q": WRONG_RECURSIVE[
        "top-k siblings, ratio test with softmax q"
    ].distance,
    "ratio accept with q(x), residual subtracts q only at x": WRONG_RECURSIVE[
        "residual subtracts q only at x"
    ].distance,
    "match test, then fresh draw from p on a miss": lambda: distance(
        fresh_draw_on_a_miss(DRAFTS["tree"], P), P, 4
    ),
    "no-replacement siblings, q not renormalised": WRONG_RECURSIVE[
        "no replacement, q not renormalised"
    ].distance,
    "pruning a sampled node by its own value": WRONG_RECURSIVE["pruning by own value"].distance,
    "duplicate sibling counted twice in the cumulative walk": lambda: distance(
        outcomes(cumulative_walk([1, 1], P)), P, 1
    ),
    "rejected coin reused for the final draw": WRONG_RECURSIVE["rejected coin reused"].distance,
    "residual minus uninitialised draft_probs": WRONG_RECURSIVE[
        "uninitialised draft probabilities"
    ].distance,
    "coin <= p with coin = 0 accepts p=0 tokens": lambda: float(impossible_tokens(AtMost(0.0))),
    "threshold_acc, relaxed and typical acceptance": lambda: min(
        WRONG_RECURSIVE["relaxed threshold"].distance(),
        WRONG_RECURSIVE["typical acceptance"].distance(),
    ),
    "ratio test + residual drawn with the draft's own Gumbel vector": WRONG_RECURSIVE[
        "residual drawn with the draft's noise"
    ].distance,
    "block verification with position-keyed RNG re-used next round": position_keyed_block,
    "draft sampled in bf16, ratio computed in fp32": WRONG_RECURSIVE[
        "draft drawn in bf16"
    ].distance,
    "penalties: only the last accepted token accumulated": AnsweredBy(
        "test_verify_process.py", "test_counting_only_the_last_accepted_token_would_be_seen"
    ),
    "TP ranks draw different bonus tokens": CannotHappen(
        "no tensor parallelism: one process draws each token, from integers and not from a "
        "probability that ranks could round differently"
    ),
    # not a rule of sampling: the chain gives a row the same bits beside any other rows; the pass
    # of the target itself may round, and its streams are compared in test_prove_streams.py
    "verify pass M=k+1 rounds differently from decode M=1": AnsweredBy(
        "test_verify_process.py", "test_a_row_has_the_same_bits_whatever_stands_beside_it"
    ),
}


@pytest.mark.parametrize("row", KNOWN_VIOLATIONS)
def test_every_known_violation_is_caught_or_cannot_happen(row: str) -> None:
    found = KNOWN_VIOLATIONS[row]
    if isinstance(found, AnsweredBy):
        assert found.function in functions_of(found.file)
    elif isinstance(found, CannotHappen):
        assert found.reason
    else:
        assert found() > WRONG


def functions_of(file: str) -> set[str]:
    """The tests of a file beside this one."""
    tree = ast.parse((File(__file__).parent / file).read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {name for name in names if name.startswith("test_")}


def test_a_test_that_is_not_there_answers_nothing() -> None:
    assert "test_that_nobody_wrote" not in functions_of("test_verify_process.py")


@dataclass(frozen=True)
class Fault:
    """A line of furcate/verify, what it is changed to, and the check that must see it."""

    owner: Any  # module or class
    function: str
    line: str
    wrong: str
    check: Callable[[], float]

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        right = getattr(self.owner, self.function)
        source = textwrap.dedent(inspect.getsource(right))
        assert source.count(self.line) == 1, "the line that is to be changed has changed itself"
        space = {"torch": torch, **vars(sys.modules[right.__module__])}
        exec(compile(source.replace(self.line, self.wrong), "planted", "exec"), space)
        patch.setattr(self.owner, self.function, space[self.function])


def coins_met_again() -> float:
    """Coins of a round that a later round has too; 0 if every name has a coin of its own."""
    rounds = [RoundCoins(seed=3, root=root) for root in (7, 8, 9)]
    coins = [{one._coin(ACCEPT, index) for index in range(6)} for one in rounds]
    return float(sum(len(a & b) for a, b in itertools.combinations(coins, 2)))


class AtZero(RoundCoins):
    """The real comparison, and a coin that shows 0 every time."""

    def _coin(self, stream: int, index: int) -> float:
        return 0.0


def impossible_at_coin_0() -> float:
    return float(impossible_tokens(AtZero(seed=0, root=0)))


DRAW = "coins.draw(DRAFT, node, law_V)"
LEFT = "residual(law_V, draft_V)"
RATIO = "float(law_V[token] / draft_V[token])"
FINAL = "coins.draw(RESIDUAL if children else BONUS, node, law_V)"
TYPICAL = "float(law_V[token] > min(0.3, 0.55 * (-torch.special.entr(law_V).sum()).exp()))"
FAULTS = {
    "argmax draft + ratio test with softmax q": Fault(
        recursive, "draw_children", DRAW, "int(law_V.argmax())", RIGHT_CHAIN.distance
    ),
    "top-k siblings + SpecInfer RRS with softmax q": Fault(
        recursive,
        "draw_children",
        DRAW,
        "int(law_V.topk(count).indices[node - first])",
        RIGHT.distance,
    ),
    "ratio accept with q(x), residual subtracts q only at x": Fault(
        recursive,
        "verify",
        LEFT,
        "residual(law_V, draft_V * (torch.arange(len(draft_V)) == token))",
        RIGHT.distance,
    ),
    "no-replacement siblings, q not renormalised": Fault(
        recursive,
        "without",
        "rest_V / mass if mass > 0 else rest_V",
        "rest_V",
        replace(RIGHT, replacement=False).distance,
    ),
    "pruning a sampled node by its own value": Fault(
        recursive,
        "draw_children",
        "return tokens",
        "return [t for t in tokens if law_V[t] > 0.3]",
        RIGHT.distance,
    ),
    "rejected coin reused for the final draw": Fault(
        recursive,
        "verify",
        FINAL,
        "coins.draw(*((ACCEPT, children[-1]) if children else (BONUS, node)), law_V)",
        RIGHT_CHAIN.distance,
    ),
    "residual minus uninitialised draft_probs": Fault(
        recursive, "verify", LEFT, "residual(law_V, draft_V.flip(0))", RIGHT.distance
    ),
    "coin <= p with coin = 0 accepts p=0 tokens": Fault(
        RoundCoins, "below", "<", "<=", impossible_at_coin_0
    ),
    "threshold_acc": Fault(recursive, "verify", RATIO, RATIO + " / 0.7", RIGHT.distance),
    "typical acceptance": Fault(recursive, "verify", RATIO, TYPICAL, RIGHT.distance),
    "ratio test + residual drawn with the draft's own Gumbel vector": Fault(
        recursive,
        "verify",
        FINAL,
        "coins.draw(*((DRAFT, children[0]) if children else (BONUS, node)), law_V)",
        RIGHT_CHAIN.distance,
    ),
    "block verification with position-keyed RNG re-used next round": Fault(
        RoundCoins,
        "_coin",
        "torch.tensor([index >> 2, self.root, stream, self.choice]))",
        "torch.tensor([0, self.root + index, stream, self.choice])); index = 0",
        coins_met_again,
    ),
    "draft sampled in bf16, ratio computed in fp32": Fault(
        recursive,
        "draw_children",
        DRAW,
        "coins.draw(DRAFT, node, law_V.bfloat16().double())",
        RIGHT.distance,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_same_fault_in_the_module_itself_is_caught(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    assert fault.check() <= EXACT
    fault.plant(monkeypatch)
    assert fault.check() > WRONG


def test_all_rows_of_the_table_are_accounted_for() -> None:
    assert len(KNOWN_VIOLATIONS) == 17


def test_three_sizes_agree_with_an_independent_enumeration() -> None:
    for name, size in [
        ("argmax draft, ratio test with softmax q", 0.50),
        ("top-k siblings, ratio test with softmax q", 0.50),
        ("no replacement, q not renormalised", 0.045),
    ]:
        assert WRONG_RECURSIVE[name].distance() == pytest.approx(size, abs=5e-4)
    assert RIGHT.distance() <= EXACT
    assert RIGHT_CHAIN.distance() <= EXACT


def test_the_cumulative_walk_is_right_while_siblings_differ() -> None:
    assert distance(outcomes(cumulative_walk([2, 1], TARGET)), TARGET, 1) <= EXACT


def test_a_draw_per_path_would_be_seen() -> None:
    draft = draft_of([0, 1, 2, 3], [0, 0, 0, 0])
    assert distance(coupled(draft, TARGET), TARGET, 2) <= EXACT
    assert distance(one_draw_per_path(draft, TARGET), TARGET, 2) > WRONG
