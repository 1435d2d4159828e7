"""Draws a tree as text for a terminal: tokens, path probabilities, the accepted path marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from furcate.errors import BadRequest
from furcate.tree.topology import Topology

__all__ = ["BONUS", "Picture", "as_text", "percent", "visible"]

BONUS = -1  # stands for the bonus where a row is asked for


@dataclass(frozen=True, slots=True)
class Picture:
    """What there is to draw.

    Args:
        topology: the shape.
        labels: text of each row's token; without them rows are shown by number.
        values: probability of each row's path, 1 at the root.
        path: accepted rows from the root on, as in a verdict; None: nothing was verified yet.
        bonus: text of the target's own token at the end of the path.

    Raises:
        BadRequest: a list of the wrong length, a value outside 0..1, a path that is not one.
    """

    topology: Topology
    labels: Sequence[str] | None = None
    values: Sequence[float] | None = None
    path: Sequence[int] | None = None
    bonus: str | None = None

    def __post_init__(self) -> None:
        rows = self.topology.rows
        for field, given in (("labels", self.labels), ("values", self.values)):
            if given is not None and len(given) != rows:
                raise BadRequest(f"needs one for each of {rows} rows", field=field, value=given)
        for row, value in enumerate(self.values or ()):
            if not 0 <= value <= 1:
                raise BadRequest("must be a probability", field=f"values[{row}]", value=value)
        if self.path is None and self.bonus is not None:
            raise BadRequest("stands at the end of a path; give one", field="bonus")
        if self.path is not None and not self._is_path(tuple(self.path)):
            raise BadRequest("must lead from row 0 down the tree", field="path", value=self.path)

    def _is_path(self, path: tuple[int, ...]) -> bool:
        ends_in_tree = bool(path) and 0 <= path[-1] < self.topology.rows
        return ends_in_tree and self.topology.path(path[-1]) == path

    def branches(self, row: int) -> tuple[int, ...]:
        """What hangs below a row: the bonus first, then children, most valuable first.

        Without values, or where they are equal, children stand by rank.
        """
        if row == BONUS:
            return ()
        rank, values = self.topology.rank, self.values

        def order(child: int) -> tuple[float, int]:
            return (0.0 if values is None else -values[child], rank[child])

        children = [c for c, up in enumerate(self.topology.parent) if up == row]
        ends_here = self.bonus is not None and self.path is not None and self.path[-1] == row
        return (*([BONUS] if ends_here else []), *sorted(children, key=order))

    def label(self, row: int) -> str:
        """The token of a row, or of the bonus, as it can be shown on one line."""
        if row == BONUS:
            return visible(self.bonus or "")
        return f"row {row}" if self.labels is None else visible(self.labels[row])

    def is_accepted(self, row: int) -> bool:
        """Whether the row lies on the accepted path."""
        return self.path is not None and row in self.path


def as_text(picture: Picture) -> str:
    """A box drawing, one row per line: ● accepted, ○ not, ★ the bonus. Ends with a newline."""
    lines: list[str] = []
    waiting = [(0, "", "")]  # row, what stands before it, what stands before its children
    while waiting:
        row, before, below = waiting.pop()
        lines.append(before + _line(picture, row))
        branches = picture.branches(row)
        for child in reversed(branches):
            is_last = child == branches[-1]
            branch, onward = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
            waiting.append((child, below + branch, below + onward))
    return "\n".join(lines) + "\n"


def _line(picture: Picture, row: int) -> str:
    if row == BONUS:
        return f"★ {picture.label(row)}"
    mark = "" if picture.path is None else "● " if picture.is_accepted(row) else "○ "
    value = "" if picture.values is None or row == 0 else f"  {percent(picture.values[row])}"
    return f"{mark}{picture.label(row)}{value}"


def visible(token: str) -> str:
    """A token's text on one line: outer spaces as ␣, whatever does not print as an escape."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token)
    inner = shown.strip(" ")
    before = len(shown) - len(shown.lstrip(" "))
    return "␣" * before + inner + "␣" * (len(shown) - before - len(inner))


def percent(value: float) -> str:
    """A probability with two significant digits where they say something."""
    if value >= 0.995 or value == 0:
        return f"{value:.0%}"
    if value >= 0.0995:
        return f"{value * 100:.0f}%"
    return f"{value * 100:.1f}%" if value >= 0.0005 else "<0.1%"
