"""The best static tree, against Sequoia's dynamic programme and against every connected tree."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furcate.errors import BadRequest
from furcate.tree.static import best_static_tree, expected_tokens, node_values
from furcate.tree.topology import Topology

Table = list[list[float]]
CLOSE = 1e-9  # sums of a dozen products in another order


@st.composite
def tables(draw: st.DrawFn, *, most_depth: int = 4, most_rank: int = 4) -> Table:
    """Rows of shares that sum to at most 1, in no order of rank or depth."""
    rows = draw(
        st.lists(
            st.lists(st.integers(0, 12), min_size=1, max_size=most_rank),
            min_size=1,
            max_size=most_depth,
        )
    )
    return [[share / max(12, sum(row)) for share in row] for row in rows]


def sequoia(table: Table, nodes: int) -> float:
    """Expected tokens of the best tree: F(m, l, b) of 2402.12374, ranks sorted as it assumes."""
    ranked = [sorted(row, reverse=True) for row in table]

    @cache
    def tree(rows: int, depth: int) -> float:
        """Best expected tokens of a subtree with a root at `depth` and at most `rows` rows."""
        return 1 + children(rows - 1, depth, 0)

    @cache
    def children(rows: int, depth: int, rank: int) -> float:
        """Best share of `rows` rows among the children from `rank` on."""
        if rows == 0 or depth == len(ranked) or rank == len(ranked[depth]):
            return 0.0
        return max(
            (ranked[depth][rank] * tree(own, depth + 1) if own else 0.0)
            + children(rows - own, depth, rank + 1)
            for own in range(rows + 1)
        )

    return tree(nodes + 1, 0)


def every_tree(table: Table, nodes: int) -> Iterator[Topology]:
    """All connected trees of exactly `nodes` nodes that the table knows."""

    def grow(chosen: frozenset[tuple[int, ...]]) -> Iterator[frozenset[tuple[int, ...]]]:
        if len(chosen) == nodes:
            yield chosen
            return
        for path in {(), *chosen}:
            if len(path) < len(table):
                for rank in range(len(table[len(path)])):
                    if (*path, rank) not in chosen:
                        yield from grow(chosen | {(*path, rank)})

    for chosen in set(grow(frozenset())):
        yield Topology.from_choices(sorted(chosen))


@settings(deadline=None)
@given(tables(), st.integers(0, 14))
def test_the_heap_equals_sequoias_programme(table: Table, nodes: int) -> None:
    tree = best_static_tree(table, nodes)
    assert tree.topology.nodes <= nodes
    assert tree.expected_tokens == pytest.approx(sequoia(table, nodes), abs=CLOSE)
    assert tree.expected_tokens == pytest.approx(expected_tokens(tree.topology, table), abs=CLOSE)


@settings(deadline=None, max_examples=30)
@given(tables(most_depth=3, most_rank=2), st.integers(0, 4))
def test_no_connected_tree_earns_more(table: Table, nodes: int) -> None:
    best = best_static_tree(table, nodes).expected_tokens
    for topology in every_tree(table, nodes):
        assert expected_tokens(topology, table) <= best + CLOSE


def test_the_check_can_fail() -> None:
    table = [[0.5, 0.4], [0.9]]
    level_by_level = Topology.star(2)
    assert expected_tokens(level_by_level, table) < sequoia(table, 2) - CLOSE


@settings(deadline=None)
@given(tables(), st.integers(0, 14))
def test_the_tree_is_connected_and_in_preorder(table: Table, nodes: int) -> None:
    tree = best_static_tree(table, nodes)
    assert tree.topology.is_preorder
    assert tree.topology.preorder(tree.values) == tuple(range(tree.topology.rows))
    for row in range(1, tree.topology.rows):
        assert tree.values[row] <= tree.values[tree.topology.parent[row]]


@settings(deadline=None)
@given(tables(), st.integers(0, 14))
def test_values_are_products_along_the_path(table: Table, nodes: int) -> None:
    tree = best_static_tree(table, nodes)
    assert tree.values == pytest.approx(node_values(tree.topology, table), abs=CLOSE)
    assert list(tree.gains) == sorted(tree.values[1:], reverse=True)


def test_acceptance_that_rises_with_rank_and_depth_is_taken_as_it_is() -> None:
    tree = best_static_tree([[0.1, 0.6], [0.2, 0.8], [1.0]], 4)
    assert tree.topology.to_choices() == [[1], [1, 1], [1, 1, 0], [1, 0]]
    assert tree.expected_tokens == pytest.approx(1 + 0.6 + 0.48 + 0.48 + 0.12)


def test_certain_children_still_come_after_their_parents() -> None:
    tree = best_static_tree([[1.0], [1.0], [1.0]], 3)
    assert tree.topology == Topology.chain(3)
    assert tree.expected_tokens == 4


def test_what_is_never_accepted_is_not_drafted() -> None:
    assert best_static_tree([[0.5, 0.0], [0.0]], 8).topology.nodes == 1
    assert best_static_tree([[0.0]], 8).topology.nodes == 0


def test_a_table_may_be_smaller_than_the_budget() -> None:
    assert best_static_tree([[0.5, 0.3]], 64).topology == Topology.star(2)


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ([], "acceptance"),
        ([[]], "acceptance"),
        ([[0.5], [0.2, 1.5]], r"acceptance\[1\]\[1\]"),
        ([[0.5], [-0.1]], r"acceptance\[1\]\[0\]"),
        ([[float("nan")]], r"acceptance\[0\]\[0\]"),
        ([[0.5], [0.7, 0.4]], r"acceptance\[1\]"),
    ],
)
def test_a_table_out_of_range_is_refused_by_name(table: Table, field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        best_static_tree(table, 3)


def test_a_row_may_sum_to_one_but_for_rounding() -> None:
    assert best_static_tree([[0.3334, 0.3334, 0.3334]], 3).topology == Topology.star(3)


@pytest.mark.parametrize("nodes", [-1, True, 2.5])
def test_a_budget_that_is_no_count_is_refused(nodes: int) -> None:
    with pytest.raises(BadRequest, match="nodes"):
        best_static_tree([[0.5]], nodes)


@pytest.mark.parametrize("topology", [Topology.chain(2), Topology.star(3)])
def test_a_tree_beyond_the_table_is_refused(topology: Topology) -> None:
    with pytest.raises(BadRequest, match="says nothing of depth"):
        expected_tokens(topology, [[0.5, 0.2]])
