"""The shape of a tree: parents and ranks, depth-first order, subtree ends, ancestor words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from furcate.errors import BadRequest

__all__ = ["TILE", "Topology"]

TILE = 32  # rows are padded to whole tiles: one warp lane per row, one uint32 word per tile


@dataclass(frozen=True, slots=True)
class Topology:
    """The shape alone: row 0 is the root (the last committed token), the others are drafted nodes.

    Args:
        parent: row of each row's parent, -1 at the root; parents come before their children.
        rank: which of its parent's candidates a row is, 0 the drafter's best guess; siblings
            differ, gaps are allowed, 0 at the root. `from_parents` numbers siblings in order.

    Raises:
        BadRequest: the lists do not describe one tree.
    """

    parent: tuple[int, ...]
    rank: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_parents(self.parent)
        _check_ranks(self.parent, self.rank)

    @classmethod
    def from_parents(cls, parents: Iterable[int]) -> Topology:
        """A tree from its parent list; siblings are ranked in the order in which they stand."""
        parent = tuple(parents)
        _check_parents(parent)
        seen = [0] * len(parent)
        rank = [0]
        for up in parent[1:]:
            rank.append(seen[up])
            seen[up] += 1
        return cls(parent, tuple(rank))

    @classmethod
    def chain(cls, nodes: int) -> Topology:
        """`nodes` drafted nodes, each the child of the one before."""
        return cls.from_parents(range(-1, _node_count(nodes)))

    @classmethod
    def star(cls, nodes: int) -> Topology:
        """`nodes` drafted nodes, all children of the root."""
        return cls.from_parents([-1, *[0] * _node_count(nodes)])

    @classmethod
    def from_choices(cls, choices: Iterable[Sequence[int]]) -> Topology:
        """A tree from Medusa's choice list: one path of ranks per node, such as [0], [0, 0], [1].

        Rows come in depth-first preorder, lowest rank first, whatever the order of the list.
        """
        # lexicographic order of rank paths is that preorder, since a prefix sorts first
        paths = sorted(_rank_path(at, choice) for at, choice in enumerate(choices))
        row_of: dict[tuple[int, ...], int] = {(): 0}
        for path in paths:
            if path in row_of:
                raise BadRequest("the same path stands twice", field="choices", value=list(path))
            if path[:-1] not in row_of:
                raise BadRequest(
                    "a path without its parent",
                    field="choices",
                    value=list(path),
                    hint=f"add {list(path[:-1])}",
                )
            row_of[path] = len(row_of)
        parent = (-1, *(row_of[path[:-1]] for path in paths))
        return cls(parent, (0, *(path[-1] for path in paths)))

    def to_choices(self) -> list[list[int]]:
        """Medusa's choice list, one path of ranks per drafted node, in row order."""
        paths: list[list[int]] = [[]]
        for up, rank in zip(self.parent[1:], self.rank[1:], strict=True):
            paths.append([*paths[up], rank])
        return paths[1:]

    @property
    def rows(self) -> int:
        """Rows in use, root included."""
        return len(self.parent)

    @property
    def nodes(self) -> int:
        """Drafted nodes, root excluded; what `num_draft_tokens` counts."""
        return len(self.parent) - 1

    @property
    def padded_rows(self) -> int:
        """Rows after padding to whole tiles of 32."""
        return -(-self.rows // TILE) * TILE

    @property
    def depth(self) -> tuple[int, ...]:
        """Edges between the root and each row; 0 at the root."""
        depth = [0]
        for up in self.parent[1:]:
            depth.append(depth[up] + 1)
        return tuple(depth)

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Rows of each row's children, ascending."""
        below: list[list[int]] = [[] for _ in self.parent]
        for row, up in enumerate(self.parent[1:], start=1):
            below[up].append(row)
        return tuple(map(tuple, below))

    def path(self, row: int) -> tuple[int, ...]:
        """Rows from the root to `row`, both included."""
        if not 0 <= row < self.rows:
            raise BadRequest(f"this tree has rows 0 to {self.rows - 1}", field="row", value=row)
        up = [row]
        while up[-1] > 0:
            up.append(self.parent[up[-1]])
        return tuple(reversed(up))

    def preorder(self, values: Sequence[float]) -> tuple[int, ...]:
        """Rows in depth-first preorder, most valuable child first; equal values: lower row first.

        Args:
            values: one number per row (the root's is not looked at), probabilities or their logs.
        """
        _check_values(values, self.rows)
        children = self.children
        order: list[int] = []
        waiting = [0]
        while waiting:
            row = waiting.pop()
            order.append(row)
            # the last one waiting is visited next, so the best child goes on last
            waiting += sorted(children[row], key=lambda child: (values[child], -child))
        return tuple(order)

    def relabelled(self, order: Sequence[int]) -> Topology:
        """The same tree with row `order[i]` renamed to i; parents must still come first."""
        if sorted(order) != list(range(self.rows)):
            raise BadRequest(
                f"every row 0 to {self.rows - 1} must be named once", field="order", value=order
            )
        name = {old: new for new, old in enumerate(order)} | {-1: -1}
        parent = tuple(name[self.parent[old]] for old in order)
        return Topology(parent, tuple(self.rank[old] for old in order))

    @property
    def is_preorder(self) -> bool:
        """Whether the rows stand in depth-first preorder, so that every subtree is one interval."""
        open_path: list[int] = []
        for row, up in enumerate(self.parent):
            while open_path and open_path[-1] != up:
                open_path.pop()
            if row > 0 and not open_path:
                return False
            open_path.append(row)
        return True

    @property
    def end(self) -> tuple[int, ...]:
        """One past each row's subtree: j is an ancestor of i, or i itself, iff j <= i < end[j].

        Raises:
            BadRequest: the rows are not in depth-first preorder.
        """
        if not self.is_preorder:
            raise BadRequest(
                "a subtree is an interval of rows only in depth-first preorder",
                field="parent",
                value=self.parent,
                hint="use topology.relabelled(topology.preorder(values))",
            )
        size = [1] * self.rows
        for row in range(self.nodes, 0, -1):
            size[self.parent[row]] += size[row]
        return tuple(row + below for row, below in enumerate(size))

    @property
    def ancestor_words(self) -> tuple[tuple[int, ...], ...]:
        """uint32 words [padded_rows][padded_rows / 32]: bit j % 32 of word j // 32 of row i is set
        iff j is i or an ancestor of i. A pad is nobody's descendant: its only bit is its own.
        """
        bits = [1]
        for row, up in enumerate(self.parent[1:], start=1):
            bits.append(bits[up] | 1 << row)
        bits += [1 << pad for pad in range(self.rows, self.padded_rows)]
        return tuple(_words(row_bits, self.padded_rows // TILE) for row_bits in bits)


def _words(bits: int, count: int) -> tuple[int, ...]:
    return tuple(bits >> (TILE * word) & 0xFFFFFFFF for word in range(count))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _node_count(nodes: int) -> int:
    if not _is_int(nodes) or nodes < 0:
        raise BadRequest("must be a whole number, 0 or more", field="nodes", value=nodes)
    return nodes


def _rank_path(at: int, choice: Sequence[int]) -> tuple[int, ...]:
    ranks_only = isinstance(choice, Sequence) and all(_is_int(r) and r >= 0 for r in choice)
    if not ranks_only or not choice:
        raise BadRequest(
            "must be a path of ranks such as [0, 2]: whole numbers, 0 or more, at least one",
            field=f"choices[{at}]",
            value=choice,
        )
    return tuple(choice)


def _check_parents(parent: tuple[int, ...]) -> None:
    if not parent or parent[0] != -1:
        raise BadRequest(
            "the first row is the root and has parent -1", field="parent", value=parent
        )
    for row, up in enumerate(parent[1:], start=1):
        if not _is_int(up) or not 0 <= up < row:
            raise BadRequest(
                "a parent must come before its children",
                field=f"parent[{row}]",
                value=up,
                hint=f"use a row from 0 to {row - 1}",
            )


def _check_ranks(parent: tuple[int, ...], rank: tuple[int, ...]) -> None:
    if len(rank) != len(parent) or rank[0] != 0:
        raise BadRequest(
            f"needs one rank for each of {len(parent)} rows, 0 at the root",
            field="rank",
            value=rank,
        )
    taken: set[tuple[int, int]] = set()
    for row, place in enumerate(zip(parent, rank, strict=True)):
        if not _is_int(place[1]) or place[1] < 0:
            raise BadRequest("must be 0 or more", field=f"rank[{row}]", value=place[1])
        if place in taken:
            raise BadRequest("siblings share a rank", field=f"rank[{row}]", value=place[1])
        taken.add(place)


def _check_values(values: Sequence[float], rows: int) -> None:
    if len(values) != rows:
        raise BadRequest(
            f"needs one value for each of {rows} rows", field="values", value=len(values)
        )
    for row, value in enumerate(values):
        if math.isnan(value):
            raise BadRequest("is not a number", field=f"values[{row}]", value=value)
