"""The shape of a tree: intervals, words and paths all say the same of ancestry."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furcate.errors import BadRequest
from furcate.tree.topology import TILE, Topology


@st.composite
def topologies(draw: st.DrawFn, most: int = 70) -> Topology:
    nodes = draw(st.integers(0, most))
    return Topology.from_parents([-1, *(draw(st.integers(0, row)) for row in range(nodes))])


@st.composite
def valued(draw: st.DrawFn) -> tuple[Topology, list[float]]:
    topology = draw(topologies())
    # few distinct values, so that ties are common
    values = st.lists(st.sampled_from([0.1, 0.2, 0.5]), min_size=topology.rows)
    return topology, draw(values)[: topology.rows]


def ancestors(topology: Topology, row: int) -> set[int]:
    """By climbing: the specification."""
    found = {row}
    while row > 0:
        row = topology.parent[row]
        found.add(row)
    return found


@settings(deadline=None)
@given(valued())
def test_the_interval_says_who_is_an_ancestor(tree: tuple[Topology, list[float]]) -> None:
    topology, values = tree
    topology = topology.relabelled(topology.preorder(values))
    end = topology.end
    for i in range(topology.rows):
        assert {j for j in range(topology.rows) if j <= i < end[j]} == ancestors(topology, i)


def test_the_interval_check_can_fail() -> None:
    breadth_first = Topology.from_parents([-1, 0, 0, 1])
    end = (4, 3, 3, 4)  # what subtree sizes would give
    assert {j for j in range(4) if j <= 3 < end[j]} != ancestors(breadth_first, 3)


@settings(deadline=None)
@given(topologies())
def test_words_say_who_is_an_ancestor_and_pads_only_name_themselves(topology: Topology) -> None:
    words = topology.ancestor_words
    assert len(words) == topology.padded_rows
    assert all(len(row) == topology.padded_rows // TILE for row in words)
    for i, row in enumerate(words):
        assert all(0 <= word < 2**32 for word in row)
        named = {j for j in range(topology.padded_rows) if row[j // TILE] >> j % TILE & 1}
        assert named == (ancestors(topology, i) if i < topology.rows else {i})


@pytest.mark.parametrize(("nodes", "padded"), [(0, 32), (31, 32), (32, 64), (63, 64), (127, 128)])
def test_rows_are_padded_to_whole_tiles(nodes: int, padded: int) -> None:
    assert Topology.chain(nodes).padded_rows == padded


@settings(deadline=None)
@given(topologies())
def test_a_path_leads_from_the_root_through_parents(topology: Topology) -> None:
    for row in range(topology.rows):
        path = topology.path(row)
        assert path[0] == 0
        assert path[-1] == row
        assert all(topology.parent[b] == a for a, b in pairwise(path))
        assert len(path) == topology.depth[row] + 1


@settings(deadline=None)
@given(valued())
def test_preorder_visits_the_most_valuable_child_first(tree: tuple[Topology, list[float]]) -> None:
    topology, values = tree
    order = topology.preorder(values)
    place = {row: at for at, row in enumerate(order)}
    for children in topology.children:
        for a in children:
            for b in children:
                if values[a] > values[b] or (values[a] == values[b] and a < b):
                    assert place[a] < place[b]


@settings(deadline=None)
@given(valued())
def test_preorder_is_depth_first_and_stable(tree: tuple[Topology, list[float]]) -> None:
    topology, values = tree
    order = topology.preorder(values)
    laid_out = topology.relabelled(order)
    assert laid_out.is_preorder
    assert laid_out.preorder([values[row] for row in order]) == tuple(range(topology.rows))


def test_the_likeliest_path_takes_the_first_rows() -> None:
    topology = Topology.from_parents([-1, 0, 0, 2, 1, 3])
    assert topology.preorder([1.0, 0.3, 0.6, 0.5, 0.1, 0.4]) == (0, 2, 3, 5, 1, 4)


def test_a_tree_out_of_preorder_has_no_intervals() -> None:
    with pytest.raises(BadRequest, match="relabelled"):
        _ = Topology.from_parents([-1, 0, 0, 1]).end


def test_chain_and_star_are_what_they_say() -> None:
    assert Topology.chain(3).parent == (-1, 0, 1, 2)
    assert Topology.chain(3).end == (4, 4, 4, 4)
    assert Topology.star(3).parent == (-1, 0, 0, 0)
    assert Topology.star(3).rank == (0, 0, 1, 2)
    assert Topology.star(3).end == (4, 2, 3, 4)
    assert Topology.chain(0) == Topology.star(0) == Topology.from_choices([])
    assert (Topology.chain(0).rows, Topology.chain(0).nodes) == (1, 0)


def test_a_deep_chain_is_no_trouble() -> None:
    topology = Topology.chain(5000)
    assert topology.preorder([0.0] * topology.rows) == tuple(range(5001))
    assert topology.depth[-1] == 5000


@settings(deadline=None)
@given(topologies())
def test_choices_come_back_as_the_same_tree(topology: Topology) -> None:
    again = Topology.from_choices(topology.to_choices())
    assert again.is_preorder
    assert sorted(again.to_choices()) == sorted(topology.to_choices())
    assert Topology.from_choices(reversed(again.to_choices())) == again


def test_choices_may_skip_a_rank_and_keep_it() -> None:
    topology = Topology.from_choices([[2], [0], [0, 3]])
    assert topology.parent == (-1, 0, 1, 0)
    assert topology.rank == (0, 0, 3, 2)
    assert topology.to_choices() == [[0], [0, 3], [2]]


@pytest.mark.parametrize(
    ("choices", "field"),
    [
        ([[0, 0]], "choices"),
        ([[0], [0]], "choices"),
        ([[]], r"choices\[0\]"),
        ([[0], [0, -1]], r"choices\[1\]"),
        ([[0], [True]], r"choices\[1\]"),
        ([[0], 1], r"choices\[1\]"),
        (["0"], r"choices\[0\]"),
    ],
)
def test_a_bad_choice_is_named(choices: list[list[int]], field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        Topology.from_choices(choices)


@pytest.mark.parametrize(
    "parents", [[], [0], [-1, 1], [-1, -1], [-1, 0, 2], [-1, 0.0], [-1, False]]
)
def test_parents_must_come_first(parents: list[int]) -> None:
    with pytest.raises(BadRequest, match="parent"):
        Topology.from_parents(parents)


@pytest.mark.parametrize("rank", [(0,), (1, 0, 1), (0, 0, 0), (0, 0, -1), (0, 0, 1, 2)])
def test_siblings_have_ranks_of_their_own(rank: tuple[int, ...]) -> None:
    with pytest.raises(BadRequest, match="rank"):
        Topology((-1, 0, 0), rank)


def test_what_does_not_fit_the_tree_is_refused() -> None:
    topology = Topology.star(2)
    with pytest.raises(BadRequest, match="values"):
        topology.preorder([1.0])
    with pytest.raises(BadRequest, match=r"values\[2\]"):
        topology.preorder([1.0, 0.5, float("nan")])
    with pytest.raises(BadRequest, match="row"):
        topology.path(3)
    with pytest.raises(BadRequest, match="order"):
        topology.relabelled([0, 1, 1])
    with pytest.raises(BadRequest, match="parent"):
        Topology.chain(2).relabelled([0, 2, 1])
    with pytest.raises(BadRequest, match="nodes"):
        Topology.chain(-1)
