"""The n-gram drafter: its tree, its values, and what it learns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from drafter_views import CPU, no_features, paths_of, proposed, rows_equal, view_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from furcate.config import DraftOptions
from furcate.drafters.base import View
from furcate.drafters.ngram import NgramDrafter
from furcate.drafters.ngram_calibration import PRIOR, Rates
from furcate.kernels.draft import Verdict
from furcate.kernels.ngram import LENGTHS, MEASURED, match_lengths, rates
from furcate.kernels.select import gains, select

DUMMY = 8
TEXTS = st.integers(1, 4).flatmap(
    lambda vocab: st.lists(st.integers(0, vocab), min_size=1, max_size=40)
)
OPTIONS = st.builds(
    lambda depth, topk, low, more: DraftOptions(
        depth=depth, topk=topk, prompt_lookup_min=low, prompt_lookup_max=low + more
    ),
    depth=st.integers(1, 6),
    topk=st.integers(1, 6),
    low=st.integers(1, 3),
    more=st.integers(0, 4),
)


def drafter_of(options: DraftOptions | None = None) -> NgramDrafter:
    return NgramDrafter(options or DraftOptions(), capacity=DUMMY, device=CPU)


def play(drafter: NgramDrafter, view: View, truth: Sequence[int], rows: int = 8) -> None:
    """One round in which the target would say `truth`."""
    root_B = view.tokens_BW.gather(1, view.length_B[:, None])[:, 0]
    draft = select(proposed(drafter, view), root_B, rows, torch.tensor([rows]))
    tokens, parent = draft.tokens_BR[0].tolist(), draft.parent_BR[0].tolist()
    path = [0]
    for row in range(1, int(draft.live_B)):
        if parent[row] == path[-1] and tokens[row] == [*truth, -1][len(path) - 1]:
            path.append(row)
    accepted = len(path) - 1
    path += path[-1:] * (rows - len(path))
    path_BD = torch.tensor([path])
    verdict = Verdict(path_BD, path_BD, *torch.tensor([[accepted + 1], [accepted]]))
    drafter.learn(view, draft, verdict, no_features(draft))


def common_suffix(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n


def expected_chains(
    text: Sequence[int], options: DraftOptions
) -> list[tuple[int, tuple[int, ...]]]:
    """(match length, continuation) of the matches that are followed, best first."""
    assert options.depth is not None
    assert options.topk is not None
    root = len(text) - 1
    found = []
    for end in range(root):
        length = common_suffix(text[: end + 1], text)
        if length >= options.prompt_lookup_min:
            found.append((min(length, options.prompt_lookup_max), end, length))
    best = sorted(found, reverse=True)[: options.topk]
    chains = []
    for length, end in sorted(((min(n, MEASURED), end) for _, end, n in best), reverse=True):
        after = text[end + 1 :]
        chains.append((length, tuple(after[d % len(after)] for d in range(options.depth))))
    return chains


def expected_rate(context: int, support: int, rivals: int, leads: bool) -> float:
    share = support / rivals
    if not leads:
        row = 6 + (share > 0.15) + (share > 0.34)
    elif support == rivals:
        row = 2 + min(support, 3)
    else:
        row = (share > 0.34) + (share > 0.6)
    return PRIOR[row][sum(context >= low for low in LENGTHS[1:])]


def expected_tree(text: Sequence[int], options: DraftOptions) -> dict[tuple[int, ...], float]:
    """The oracle: log values by path, from lists and loops."""
    chains = expected_chains(text, options)
    through: dict[tuple[int, ...], list[int]] = {(): list(range(len(chains)))}
    for index, (_, tokens) in enumerate(chains):
        for d in range(1, len(tokens) + 1):
            through.setdefault(tokens[:d], []).append(index)
    value: dict[tuple[int, ...], float] = {(): 0.0}
    for path in sorted(through, key=len):
        if not path:
            continue
        mine, above = through[path], through[path[:-1]]
        context = chains[mine[0]][0] + len(path) - 1
        rate = expected_rate(context, len(mine), len(above), mine[0] == above[0])
        value[path] = value[path[:-1]] + math.log(rate)
    del value[()]
    return value


@settings(max_examples=150, deadline=None)
@given(TEXTS, OPTIONS)
def test_the_tree_is_what_a_search_by_hand_finds(text: list[int], options: DraftOptions) -> None:
    found = paths_of(proposed(drafter_of(options), view_of([text], width=len(text) + 3, garbage=1)))
    assert found == pytest.approx(expected_tree(text, options), abs=1e-4)


def test_the_oracle_notices_a_token_past_the_root() -> None:
    options = DraftOptions(depth=3, topk=4)
    found = paths_of(proposed(drafter_of(options), view_of([[1, 2, 1, 2, 1]])))
    assert found != pytest.approx(expected_tree([1, 2, 1, 2, 1, 2], options), abs=1e-4)


def test_only_committed_tokens_are_proposed() -> None:
    text = [5, 6, 7, 5, 6]
    found = paths_of(proposed(drafter_of(), view_of([text], width=40, garbage=9)))
    assert found
    assert {token for path in found for token in path} <= set(text)


def test_a_continuation_that_reaches_the_root_goes_round_again() -> None:
    found = paths_of(proposed(drafter_of(DraftOptions(depth=6)), view_of([[4, 9, 8, 4, 9, 8]])))
    assert (4, 9, 8, 4, 9, 8) in found


def test_match_lengths_count_back_from_each_column() -> None:
    length_BW = match_lengths(torch.tensor([[1, 2, 3, 1, 2, 3, 7]]), torch.tensor([5]), 4)
    assert length_BW.tolist() == [[0, 0, 3, 0, 0, 0, 0]]


@pytest.mark.parametrize("text", [[3], [1, 2, 3, 4, 5]], ids=["root alone", "no word recurs"])
def test_where_nothing_recurs_nothing_is_proposed(text: list[int]) -> None:
    assert paths_of(proposed(drafter_of(), view_of([text]))) == {}


def test_a_common_word_earns_little_and_a_copied_passage_much() -> None:
    word = [9, 1, 9, 2, 9, 3, 9, 4, 9]
    passage = [*range(20, 50), 99, *range(20, 40)]
    drafter = drafter_of()
    gain_BN = gains(proposed(drafter, view_of([word, passage])), 15)
    assert gain_BN[0, 0] < 0.2
    assert gain_BN[1, :8].sum() > 6


def test_a_match_promises_less_the_hotter_the_request_and_a_weak_one_loses_most() -> None:
    table = Rates(CPU).table
    cold_K, warm_K, hot_K = rates(torch.tensor([0.0, 0.7, 1.2]), table)
    assert torch.allclose(cold_K, torch.tensor(PRIOR).flatten())
    assert bool((hot_K < warm_K).all()) and bool((warm_K < cold_K).all())
    assert hot_K[3] < 0.6 * cold_K[3] and hot_K[-1] > 0.5 * cold_K[-1]
    endless_K = rates(torch.tensor([100.0]), table)[0]
    assert bool(endless_K.log().isfinite().all())


@settings(max_examples=30, deadline=None)
@given(st.lists(TEXTS, min_size=2, max_size=4))
def test_a_request_does_not_see_its_neighbours(texts: list[list[int]]) -> None:
    drafter, width = drafter_of(), max(map(len, texts))
    together = proposed(drafter, view_of(texts, width=width))
    for b, text in enumerate(texts):
        alone = proposed(drafter, view_of([text], width=width))
        assert rows_equal(together, alone, b, 0)


@pytest.mark.parametrize("right", [True, False])
def test_rates_follow_what_is_accepted(right: bool) -> None:
    drafter, view = drafter_of(), view_of([[1, 2, 3, 1, 2]])
    before = paths_of(proposed(drafter, view))[(3,)]
    for _ in range(20):
        play(drafter, view, [3 if right else 8])
    after = paths_of(proposed(drafter, view))[(3,)]
    assert (after > before) == right


def test_rates_settle_at_the_true_frequency() -> None:
    drafter, view = drafter_of(), view_of([[1, 2, 3, 1, 2]])
    for i in range(400):
        play(drafter, view, [3 if i % 4 == 0 else 8])
    # the prior weighs 16 of 16 + 50 counts that have not faded, and says 0.58
    expected = (16 * 0.58 + 50 * 0.25) / 66
    assert math.exp(paths_of(proposed(drafter, view))[(3,)]) == pytest.approx(expected, abs=0.02)


def test_a_rate_that_fell_comes_back_while_other_nodes_are_drafted() -> None:
    drafter, poor, good = drafter_of(), view_of([[1, 2, 3, 1, 2]]), view_of([[*range(20)] * 2])
    before = paths_of(proposed(drafter, poor))[(3,)]
    for _ in range(100):
        play(drafter, poor, [8])
    fallen = paths_of(proposed(drafter, poor))[(3,)]
    for _ in range(400):
        play(drafter, good, range(20), rows=4)
    assert fallen < before - 0.5
    assert paths_of(proposed(drafter, poor))[(3,)] == pytest.approx(before, abs=0.05)


def test_nodes_below_a_miss_are_not_judged() -> None:
    drafter, view = drafter_of(), view_of([[1, 2, 3, 4, 5, 1, 2]])
    play(drafter, view, [3, 9, 5, 1])
    assert drafter.rates.tried_K.sum() == 2
    assert drafter.rates.right_K.sum() == 1


def test_the_dummy_request_teaches_nothing() -> None:
    drafter = drafter_of()
    play(drafter, view_of([[1, 2, 3, 1, 2]], slots=[DUMMY]), [3])
    assert drafter.rates.tried_K.sum() == 0


def test_values_keep_falling_along_a_path_that_was_always_right() -> None:
    drafter, view = drafter_of(), view_of([[*range(30), *range(20)]])
    for _ in range(200):
        play(drafter, view, range(20, 30), rows=12)
    assert tuple(range(20, 30)) in paths_of(proposed(drafter, view))  # which checks every step


def test_propose_and_learn_read_no_value_on_the_host() -> None:
    with FakeTensorMode():
        drafter, view = drafter_of(), view_of([[1, 2, 3, 1, 2], [4, 4, 4]])
        proposal = proposed(drafter, view)
        draft = select(proposal, view.tokens_BW[:, 0], 4, torch.tensor([4, 4]))
        path_BD = torch.zeros(2, 4, dtype=torch.int64)
        verdict = Verdict(path_BD, path_BD, path_BD[:, 0] + 1, path_BD[:, 0])
        drafter.learn(view, draft, verdict, no_features(draft))
    assert proposal.value_BP.shape == (2, drafter.pool)


def test_the_prior_grows_with_the_context() -> None:
    for row in PRIOR:
        assert list(row) == sorted(row)
        assert len(row) == len(LENGTHS)
