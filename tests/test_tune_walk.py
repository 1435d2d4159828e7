"""Recorded streams are walked as the engine would play them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from furcate.kernels.draft import Proposal
from furcate.kernels.select import select
from furcate.tune.path_ranks import ABSENT, accepted_of, path_ranks
from furcate.tune.walk import (
    bootstrap,
    depth_rates,
    gains,
    tokens_per_round,
    walk,
    walk_together,
)

# root -> 5 (-1), 7 (-2); 5 -> 6 (-1.5), 8 (-3); 7 -> 6 (-2.5)
POOL = Proposal(
    tokens_BP=torch.tensor([[5, 7, 6, 8, 6]]),
    parent_BP=torch.tensor([[-1, -1, 0, 0, 1]]),
    depth_BP=torch.tensor([[1, 1, 2, 2, 2]]),
    value_BP=torch.tensor([[-1.0, -2.0, -1.5, -3.0, -2.5]]),
)


def test_ranks_of_the_path_tell_the_accepted_length_for_every_budget() -> None:
    rank_BD = path_ranks(POOL, torch.tensor([[7, 6, 9]]), deepest=3)
    assert rank_BD.tolist() == [[2, 3, ABSENT]]
    assert accepted_of(rank_BD, (2, 3, 4, 5)).tolist() == [[0, 1, 2, 2]]


def test_a_budget_by_rank_is_the_tree_that_select_cuts() -> None:
    rng = torch.Generator().manual_seed(3)
    for nodes in range(1, 6):
        value_BP = torch.rand(1, 5, generator=rng).log()
        value_BP[:, 2:4] = value_BP[:, 2:4] + value_BP[:, :1]
        value_BP[:, 4:] = value_BP[:, 4:] + value_BP[:, 1:2]
        pool = Proposal(POOL.tokens_BP, POOL.parent_BP, POOL.depth_BP, value_BP)
        draft = select(pool, torch.tensor([1]), nodes + 1, torch.tensor([nodes + 1]))
        rank = path_ranks(pool, torch.tensor([[5, 8]]), deepest=2)
        kept = {
            (int(t), int(d)) for t, d in zip(draft.tokens_BR[0], draft.depth_BR[0], strict=True)
        }
        held = int(accepted_of(rank, (nodes,)))
        assert ((5, 1) in kept) == (held >= 1)
        assert ((8, 2) in kept) == (held >= 2)


def test_levels_that_are_left_out_make_room_for_others() -> None:
    assert path_ranks(POOL, torch.tensor([[7, 6]]), deepest=1).tolist() == [[1, ABSENT]]


def test_the_end_of_the_stream_matches_nothing() -> None:
    assert path_ranks(POOL, torch.tensor([[-1, -1]]), deepest=2).tolist() == [[ABSENT, ABSENT]]


def test_a_walk_jumps_over_what_a_round_accepts() -> None:
    ranks = np.array([[0, 3], [9, 0], [1, ABSENT], [0, ABSENT]])
    found = walk(ranks, nodes=4)  # accepts 2 at root 0, then stands at root 3
    assert (found.tokens, found.rounds) == (4, 2)
    assert found.tried_D.tolist() == [2, 1] and found.held_D.tolist() == [2, 1]
    none = walk(ranks, nodes=0)
    assert none.rounds == 4 and tokens_per_round([found, none]) == pytest.approx(8 / 6)


def test_rates_by_depth_count_each_level_that_was_tried_once() -> None:
    ranks = np.array([[0, 9], [9, 9], [0, ABSENT]])
    conditional, marginal, share = depth_rates([walk(ranks, nodes=4)])
    # root 0 holds one level of two, root 2 one level of one
    assert conditional == [1.0, 0.0] and marginal == [1.0, 0.0] and share == pytest.approx(2 / 3)


def test_intervals_hold_the_mean_and_shrink_where_prompts_agree() -> None:
    rng = np.random.default_rng(0)
    same = [walk(np.zeros((8, 1), int), 1)] * 4
    mixed = [walk(np.full((8, 1), r), 1) for r in (0, 9, 0, 9)]
    found = bootstrap({"same": same, "mixed": mixed}, 500, rng)
    assert found["same"].low == found["same"].high == found["same"].value == 2.0
    assert found["mixed"].low < found["mixed"].value < found["mixed"].high
    assert found["mean_over_categories"].value == pytest.approx((2 + 4 / 3) / 2)


def test_a_gain_is_paired_prompt_by_prompt() -> None:
    # prompts differ widely, and the better drafter has twice the tokens of every one of them
    poor = [walk(np.full((12, 3), 9), nodes) for nodes in (1, 10, 1, 10)]
    good = [replace(one, tokens=2 * one.tokens) for one in poor]
    found = gains({"a": good}, {"a": poor}, 200, np.random.default_rng(0))
    assert found["a"] == found["all"]
    assert found["a"].low == pytest.approx(1.0) and found["a"].high == pytest.approx(1.0)
    apart = bootstrap({"a": good}, 200, np.random.default_rng(0))["a"]
    assert apart.high / apart.low > 1.5, "each by itself is far from sure"


def test_a_gain_over_itself_is_none() -> None:
    walks = [walk(np.array([[r], [0], [5]]), 1) for r in (0, 5, 0)]
    found = gains({"a": walks, "b": walks}, {"a": walks, "b": walks}, 100, np.random.default_rng(1))
    assert all(one.low == one.value == one.high == 0 for one in found.values())


def test_trees_that_share_nodes_leave_them_to_the_sure_ones() -> None:
    sure = np.tile([0, 1, 2], (8, 1)), np.tile([0.9, 0.8, 0.7, 0.6], (8, 1))
    lost = np.full((2, 3), ABSENT), np.tile([0.1, 0.05, 0.02, 0.01], (2, 1))
    both = walk_together([sure, lost], nodes=2)
    # while both go on the sure one takes all four nodes; alone it has two
    assert both[0].roots_R.tolist() == [0, 4] and both[1].rounds == 2
    alone = walk_together([sure], nodes=2)
    assert alone[0].roots_R.tolist() == walk(sure[0], 2).roots_R.tolist()


def test_trees_of_equal_values_share_no_more_nodes_than_there_are() -> None:
    same = np.tile([0, 1, 2], (3, 1)), np.full((3, 4), 0.5)
    found = walk_together([same, same], nodes=1)
    assert found[0].held_D.sum() + found[1].held_D.sum() <= 2 * max(w.rounds for w in found)
