"""Every rule gives the target's law, by exact enumeration; each known wrong rule is caught.

The check is `distance`: all coins of a rule are enumerated in float64, and the law of what it emits
is compared with the target's. Right rules must be within 1e-12, planted wrong ones beyond 1e-3
(rounding alone stays below 1e-15, so neither side is near its bound).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as File

import pytest
import torch
from enumeration import (
    ExactCoins,
    Outcome,
    Path,
    RoundOfCoins,
    Toy,
    constant,
    distance,
    outcomes,
)
from torch import Tensor
from verify_cases import draft_of, path_of, stacked

from furcate.kernels.accept import accept, accept_words, ancestor_words
from furcate.kernels.draft import Draft, Verdict
from furcate.verify import block, recursive
from furcate.verify.coins import Coins, RoundCoins, draw_at, residual
from furcate.verify.noise import ACCEPT, BONUS, DRAFT, RESIDUAL
from furcate.verify.recursive import DrawnTree, draw_children, without

EXACT, WRONG = 1e-12, 1e-3

TARGET = Toy(vocab=4, seed=11, support=4)
SPARSE = Toy(vocab=4, seed=12, support=3)
DRAFTER = Toy(vocab=4, seed=13, support=3)
FULL_DRAFTER = Toy(vocab=4, seed=14, support=4)

# The pair of laws for which exactness.md 2.5 gives the size of each violation.
P, Q = constant(0.5, 0.3, 0.15, 0.05), constant(0.4, 0.15, 0.35, 0.1)

Shape = tuple["Shape", ...]  # the shapes of the children's subtrees
ONE: Shape = ((),)
DEEP: Shape = ((ONE, ()), ())  # depth 3: two children, the first has two, of which one has one
SMALL: Shape = (ONE, ())


# --- the coupled rule: the target's own choices ---------------------------------------------------


def every_choice(draft: Draft, target: Toy) -> tuple[Tensor, Tensor]:
    """All choices that the rows can have, and the probability of each: [B, R], [B].

    Rows of equal path share their noise and so their choice; a pad has the root's.
    """
    live, rows = int(draft.live_B), draft.tokens_BR.shape[1]
    paths = [tuple(draft.tokens_BR[0, path_of(draft, row)].tolist()) for row in range(live)]
    paths += [()] * (rows - live)
    names = sorted(set(paths))
    combos = torch.tensor(list(itertools.product(range(target.vocab), repeat=len(names))))
    weight_B = torch.ones(len(combos), dtype=torch.float64)
    for column, path in enumerate(names):
        weight_B *= target.law(path)[combos[:, column]]
    return combos[:, [names.index(path) for path in paths]], weight_B


def coupled(draft: Draft, target: Toy, *, by_words: bool = False) -> Iterator[Outcome]:
    choice_BR, weight_B = every_choice(draft, target)
    batch = stacked([draft] * len(choice_BR))
    depth = int(draft.depth_BR.max())
    verdict = (
        accept_words(ancestor_words(batch.end_BR), batch, choice_BR, depth)
        if by_words
        else accept(batch, choice_BR, depth)
    )
    return emitted(verdict, weight_B)


def emitted(verdict: Verdict, weight_B: Tensor) -> Iterator[Outcome]:
    for weight, tokens, count in zip(
        weight_B.tolist(), verdict.emitted_BD.tolist(), verdict.count_B.tolist(), strict=True
    ):
        yield weight, tuple(tokens[:count])


DRAFTS = {
    "chain": draft_of([0, 1, 2, 3], [0, 0, 1, 2]),
    "star": draft_of([0, 1, 2, 3, 0], [0, 0, 0, 0, 0]),
    "tree": draft_of([0, 1, 2, 3, 0, 2], [0, 0, 1, 2, 1, 0]),
    "duplicates": draft_of([0, 1, 2, 1, 3, 1], [0, 0, 1, 0, 3, 4]),
    "pads": draft_of([0, 1, 2], [0, 0, 1], pads=[0, 1, 2, 3]),
    "root alone": draft_of([0], [0]),
}


@pytest.mark.parametrize("target", [TARGET, SPARSE], ids=["full", "sparse"])
@pytest.mark.parametrize("name", DRAFTS)
def test_the_coupled_rule_gives_the_targets_law(name: str, target: Toy) -> None:
    for by_words in (False, True):
        assert distance(coupled(DRAFTS[name], target, by_words=by_words), target, 4) <= EXACT


def fresh_draw_on_a_miss(draft: Draft, target: Toy) -> Iterator[Outcome]:
    """The choice decides the walk, but another draw of the target is emitted at its end."""
    for weight, tokens in coupled(draft, target):
        for token, p in enumerate(target.law(tokens[:-1]).tolist()):
            yield weight * p, (*tokens[:-1], token)


def one_draw_per_path(draft: Draft, target: Toy) -> Iterator[Outcome]:
    """cases.md 14: every path of the tree draws its own choices, the longest match wins."""
    leaves = [i for i in range(int(draft.live_B)) if draft.end_BR[0, i] == i + 1]
    chains = [draft.tokens_BR[0, [0, *path_of(draft, leaf)]].tolist() for leaf in leaves]
    walks = [
        list(coupled(draft_of(c, [0, *range(len(c) - 1)]), target)) for c in chains
    ]
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


# --- recursive rejection sampling -----------------------------------------------------------------


def grow(
    shape: Shape,
    drafter: Toy,
    coins: Coins,
    draw: Callable[..., list[int]] = draw_children,
    *,
    replacement: bool,
) -> DrawnTree:
    """Draw a tree of the given shape, level by level."""
    tokens, parent, paths = [-1], [-1], [()]
    queue: list[tuple[int, Shape]] = [(0, shape)]
    while queue:
        node, wanted = queue.pop(0)
        law_V = drafter.law(paths[node])
        born = draw(law_V, len(wanted), len(tokens), coins, replacement=replacement)
        for token, below in zip(born, wanted, strict=False):
            queue.append((len(tokens), below))
            tokens.append(token)
            parent.append(node)
            paths.append((*paths[node], token))
    draft_NV = torch.stack([drafter.law(path) for path in paths])
    return DrawnTree(tuple(tokens), tuple(parent), draft_NV, replacement)


def paths_of(tree: DrawnTree) -> list[Path]:
    paths: list[Path] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parent[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


def target_rows(tree: DrawnTree, target: Toy) -> Tensor:
    return torch.stack([target.law(path) for path in paths_of(tree)])


@dataclass(frozen=True)
class Recursive:
    """Drafting and judging, with every part replaceable by a wrong one."""

    verify: Callable[[DrawnTree, Tensor, Coins], list[int]] = recursive.verify
    draw: Callable[..., list[int]] = draw_children
    drawn_from: Callable[[Tensor], Tensor] = lambda law_V: law_V
    prune: Callable[[DrawnTree], DrawnTree] = lambda tree: tree
    coins: Callable[[Coins], Coins] = lambda coins: coins
    replacement: bool = True
    shape: Shape = SMALL
    drafter: Toy = FULL_DRAFTER
    target: Toy = TARGET

    def play(self, exact: ExactCoins) -> Path:
        coins = self.coins(exact.round(0))

        def draw(law_V: Tensor, *rest: object, **options: object) -> list[int]:
            return self.draw(self.drawn_from(law_V), *rest, **options)

        tree = self.prune(
            grow(self.shape, self.drafter, coins, draw, replacement=self.replacement)
        )
        return tuple(self.verify(tree, target_rows(tree, self.target), coins))

    def distance(self, steps: int = 3) -> float:
        return distance(outcomes(self.play), self.target, steps)


@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
@pytest.mark.parametrize("target", [TARGET, SPARSE], ids=["full", "sparse"])
def test_recursive_rejection_gives_the_targets_law(target: Toy, replacement: bool) -> None:
    rule = Recursive(shape=DEEP, drafter=DRAFTER, target=target, replacement=replacement)
    assert rule.distance(steps=4) <= EXACT


@pytest.mark.parametrize("replacement", [True, False], ids=["with", "without"])
def test_recursive_rejection_with_more_siblings_than_the_law_has_tokens(replacement: bool) -> None:
    rule = Recursive(shape=((), (), (), ()), drafter=DRAFTER, replacement=replacement)
    assert rule.distance(steps=1) <= EXACT


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
    "residual subtracts q only at x": replace(
        RIGHT, verify=Judge(left=subtract_at_the_token_only)
    ),
    "no replacement, q not renormalised": replace(
        RIGHT, verify=Judge(narrow=not_renormalised), replacement=False
    ),
    "pruning by own value": replace(RIGHT, prune=prune_by_value),
    "rejected coin reused": replace(RIGHT_CHAIN, coins=shared(RESIDUAL, ACCEPT, 1)),
    "uninitialised draft probabilities": replace(RIGHT, verify=Judge(left=stale_draft)),
    "relaxed threshold": replace(RIGHT, verify=Judge(ratio=relaxed)),
    "typical acceptance": replace(RIGHT, verify=Judge(ratio=typical)),
    "residual drawn with the draft's noise": replace(
        RIGHT_CHAIN, coins=shared(RESIDUAL, DRAFT, 1)
    ),
    "draft drawn in bf16": replace(RIGHT, drawn_from=lambda law_V: law_V.bfloat16().double()),
}


@pytest.mark.parametrize("name", WRONG_RECURSIVE)
def test_a_wrong_recursive_rule_is_caught(name: str) -> None:
    # rounding to bf16 is the mildest of them: one part in 512 of each probability at most
    bound = WRONG / 10 if name == "draft drawn in bf16" else WRONG
    assert WRONG_RECURSIVE[name].distance() > bound


# --- block verification ---------------------------------------------------------------------------


def play_block(
    target: Toy, drafter: Toy, gamma: int, coins: Coins, prefix: Path = ()
) -> Path:
    """One round: a chain of gamma drafted tokens below `prefix`, judged as a block."""
    chain: list[int] = []
    for i in range(gamma):
        chain += draw_children(
            drafter.law((*prefix, *chain)), 1, i + 1, coins, replacement=True
        )
    paths = [(*prefix, *chain[:i]) for i in range(gamma + 1)]
    draft_NV = torch.stack([drafter.law(path) for path in paths])
    target_NV = torch.stack([target.law(path) for path in paths])
    return tuple(block.verify(chain, draft_NV, target_NV, coins))


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


BINARY, BINARY_DRAFTER = Toy(vocab=2, seed=5, support=2), Toy(vocab=2, seed=9, support=2)


def several_rounds(
    one_round: Callable[[Coins, Path], Path], name: Callable[[ExactCoins, int], Coins]
) -> Callable[[ExactCoins], Path]:
    """Rounds until three tokens are out; `name` gives the coins of the round at a root."""

    def play(exact: ExactCoins) -> Path:
        out: Path = ()
        while len(out) < 3:
            out += one_round(name(exact, len(out)), out)
        return out

    return play


def block_round(coins: Coins, prefix: Path) -> Path:
    return play_block(BINARY, BINARY_DRAFTER, 2, coins, prefix)


def recursive_round(coins: Coins, prefix: Path) -> Path:
    @dataclass(frozen=True)
    class Below:
        toy: Toy

        def law(self, path: Path) -> Tensor:
            return self.toy.law((*prefix, *path))

    tree = grow(SMALL, Below(BINARY_DRAFTER), coins, replacement=True)  # type: ignore[arg-type]
    return tuple(recursive.verify(tree, target_rows(tree, Below(BINARY)), coins))  # type: ignore[arg-type]


def keyed_by_round(exact: ExactCoins, root: int) -> Coins:
    return exact.round(root)


class KeyedByPosition(RoundOfCoins):
    """A coin's name is the position that it decides, so that the next round meets it again."""

    def name(self, stream: int, index: int) -> tuple[int, ...]:
        return (stream, self.root + index)


@pytest.mark.parametrize("one_round", [block_round, recursive_round], ids=["block", "recursive"])
def test_the_joint_law_holds_across_rounds(one_round: Callable[[Coins, Path], Path]) -> None:
    play = several_rounds(one_round, keyed_by_round)
    assert distance(outcomes(play), BINARY, 3) <= EXACT


def position_keyed_block() -> float:
    return distance(outcomes(several_rounds(block_round, KeyedByPosition)), BINARY, 3)


# --- coins at the edges ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Stuck:
    """Every coin shows the same number."""

    value: float

    def below(self, stream: int, index: int, probability: float) -> bool:
        return self.value < probability

    def draw(self, stream: int, index: int, law_V: Tensor) -> int:
        return draw_at(law_V, self.value)


class AtMost(Stuck):
    """sglang#35771: coin <= probability."""

    def below(self, stream: int, index: int, probability: float) -> bool:
        return self.value <= probability


EDGES = [0.0, 2.0**-33, 1 - 2.0**-24, 1.0]


def impossible_tokens(coins: Coins) -> int:
    """Tokens of probability 0 that the rules emit over many sparse laws."""
    found = 0
    for seed in range(100):
        target, drafter = Toy(5, seed, support=2), Toy(5, seed + 500, support=3)
        trees = [
            grow(DEEP, drafter, coins, replacement=replacement) for replacement in (True, False)
        ]
        plays = [tuple(recursive.verify(t, target_rows(t, target), coins)) for t in trees]
        plays.append(play_block(target, drafter, 3, coins))
        for tokens in plays:
            found += any(target.law(tokens[:i])[x] == 0 for i, x in enumerate(tokens))
    return found


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
    assert len({tuple(row) for row in drawn}) == len(keys) and len(set(drawn[0])) > 20


# --- the table of known violations ----------------------------------------------------------------

# exactness.md 2.5, row by row: the distance that the check reports for it, or why it cannot happen.
KNOWN_VIOLATIONS: dict[str, Callable[[], float] | str] = {
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
    "draft sampled in bf16, ratio computed in fp32": lambda: (
        10 * WRONG_RECURSIVE["draft drawn in bf16"].distance()
    ),
    "penalties: only the last accepted token accumulated": (
        "planted in test_verify_process.py: "
        "test_counting_only_the_last_accepted_token_would_be_seen"
    ),
    "TP ranks draw different bonus tokens": (
        "no tensor parallelism: one process draws each token, from integers and not from a "
        "probability that ranks could round differently"
    ),
    "verify pass M=k+1 rounds differently from decode M=1": (
        "not a rule of sampling: the chain is shown to give a row the same bits beside any other "
        "rows in test_verify_process.py, the target's pass is compared where it is computed"
    ),
}


@pytest.mark.parametrize("row", KNOWN_VIOLATIONS)
def test_every_known_violation_is_caught_or_cannot_happen(row: str) -> None:
    found = KNOWN_VIOLATIONS[row]
    if isinstance(found, str):
        named = [word.rstrip(":,") for word in found.split() if word.rstrip(":,").endswith(".py")]
        assert all((File(__file__).parent / name).exists() for name in named)
    else:
        assert found() > WRONG


def test_all_rows_of_the_table_are_accounted_for() -> None:
    assert len(KNOWN_VIOLATIONS) == 17


def test_the_cumulative_walk_is_right_while_siblings_differ() -> None:
    assert distance(outcomes(cumulative_walk([2, 1], TARGET)), TARGET, 1) <= EXACT


def test_a_draw_per_path_would_be_seen() -> None:
    draft = draft_of([0, 1, 2, 3], [0, 0, 0, 0])
    assert distance(coupled(draft, TARGET), TARGET, 2) <= EXACT
    assert distance(one_draw_per_path(draft, TARGET), TARGET, 2) > WRONG
