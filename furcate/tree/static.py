"""The best static tree for a table of acceptance by depth and rank, and what a tree earns."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from furcate.errors import BadRequest
from furcate.tree.topology import Topology

__all__ = ["StaticTree", "best_static_tree", "expected_tokens", "node_values"]

ROUNDING = 1e-3  # a row of shares rounded to three or four digits may sum to a little over 1


@dataclass(frozen=True, slots=True)
class StaticTree:
    """A topology in depth-first preorder and the probability that each of its rows is accepted."""

    topology: Topology
    values: tuple[float, ...]  # 1 at the root

    @property
    def expected_tokens(self) -> float:
        """Expected tokens per round, bonus included."""
        return sum(self.values)

    @property
    def gains(self) -> tuple[float, ...]:
        """The drafted nodes' values, descending: what `CostTable.best` asks for."""
        return tuple(sorted(self.values[1:], reverse=True))


@dataclass(frozen=True, slots=True, order=True)
class _Offer:
    """A node that may be taken next; of equal values the shallower goes first, it costs less."""

    minus_value: float
    depth: int
    parent: int
    place: int  # among its siblings, best first


def best_static_tree(acceptance: Sequence[Sequence[float]], nodes: int) -> StaticTree:
    """The tree of at most `nodes` drafted nodes with the most expected tokens per round.

    A node's value is the product of its path's entries. Entries are at most 1, so the top `nodes`
    by value are connected and optimal for any table; they equal Sequoia's dynamic programme
    (2402.12374, section 3.1). Ranks need not be sorted; nodes of value 0 are left out.

    Args:
        acceptance: [depth][rank], the probability that the child of that rank is the target's
            token, given that its parent was accepted; depth 0 holds the root's children.
        nodes: most drafted nodes, root excluded.

    Raises:
        BadRequest: an entry is outside 0..1, a row sums to more than 1, or `nodes` is negative.
    """
    _check_table(acceptance)
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 0:
        raise BadRequest("must be a whole number, 0 or more", field="nodes", value=nodes)
    parent, rank, values = _grow(acceptance, nodes)
    grown = Topology(tuple(parent), tuple(rank))
    order = grown.preorder(values)
    return StaticTree(grown.relabelled(order), tuple(values[row] for row in order))


def node_values(topology: Topology, acceptance: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The probability that each row is accepted under a table; 1 at the root.

    Raises:
        BadRequest: the table is out of range, or the tree has a depth or rank it does not know.
    """
    _check_table(acceptance)
    depth = topology.depth
    values = [1.0]
    for row in range(1, topology.rows):
        level, rank = depth[row] - 1, topology.rank[row]
        if level >= len(acceptance) or rank >= len(acceptance[level]):
            raise BadRequest(
                f"says nothing of depth {level + 1}, rank {rank}, which row {row} of the tree has",
                field="acceptance",
                hint="give a larger table or a smaller tree",
            )
        values.append(values[topology.parent[row]] * acceptance[level][rank])
    return tuple(values)


def expected_tokens(topology: Topology, acceptance: Sequence[Sequence[float]]) -> float:
    """Expected tokens per round of a static tree, bonus included."""
    return sum(node_values(topology, acceptance))


def _grow(
    acceptance: Sequence[Sequence[float]], nodes: int
) -> tuple[list[int], list[int], list[float]]:
    """Parents, ranks and values of the top `nodes` by value, most valuable first."""
    best_first = [sorted(range(len(row)), key=row.__getitem__, reverse=True) for row in acceptance]
    parent, rank, values, depth = [-1], [0], [1.0], [0]
    heap: list[_Offer] = []

    def offer(up: int, place: int) -> None:
        level = depth[up]
        if level < len(best_first) and place < len(best_first[level]):
            value = values[up] * acceptance[level][best_first[level][place]]
            if value > 0:
                heapq.heappush(heap, _Offer(-value, level + 1, up, place))

    offer(0, 0)
    while heap and len(parent) <= nodes:
        taken = heapq.heappop(heap)
        parent.append(taken.parent)
        rank.append(best_first[taken.depth - 1][taken.place])
        values.append(-taken.minus_value)
        depth.append(taken.depth)
        offer(taken.parent, taken.place + 1)
        offer(len(parent) - 1, 0)
    return parent, rank, values


def _check_table(acceptance: Sequence[Sequence[float]]) -> None:
    if not acceptance or not acceptance[0]:
        raise BadRequest("needs at least depth 0, rank 0", field="acceptance", value=acceptance)
    for depth, row in enumerate(acceptance):
        for rank, share in enumerate(row):
            if not 0 <= share <= 1:
                raise BadRequest(
                    "must be a probability",
                    field=f"acceptance[{depth}][{rank}]",
                    value=share,
                    hint="use a number from 0 to 1",
                )
        if sum(row) > 1 + ROUNDING:
            raise BadRequest(
                "only one child can be the target's token, so a row sums to at most 1",
                field=f"acceptance[{depth}]",
                value=sum(row),
                hint="give each rank's own share, not the cumulative one",
            )
