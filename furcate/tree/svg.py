"""Draws a tree as one self-contained SVG: light and dark, tooltips, no script, no network."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from furcate.tree.draw import BONUS, Picture, percent

__all__ = ["as_svg"]

RADIUS = 11.0  # of a node with probability 1; area is proportional to probability
LEAST_RADIUS = 1.5
PLAIN_RADIUS = 5.0  # where no probabilities are given, and for the bonus
LINE = 38.0  # from one line of nodes to the next
MARGIN = 18.0
SPINE = 18.0  # from a node to the vertical its lower branches hang on
NOTE_CHAR = 6.1  # width of a character of the 10 px notes
CHAR = 7.3  # width of a character of 12 px monospace
LONGEST = 18  # characters of a label that are drawn; the tooltip has them all

STYLE = """
.ft-bg{fill:#fff}.ft-text{fill:#1f2328;font:12px ui-monospace,Menlo,Consolas,monospace}
.ft-note{fill:#656d76;font:10px ui-monospace,Menlo,Consolas,monospace}
.ft-edge{fill:none;stroke:#afb8c1;stroke-width:1.5}.ft-edge.ft-ghost{stroke:#d8dee4}
.ft-edge.ft-won{stroke:#1a7f37;stroke-width:3}
.ft-edge.ft-bonus{stroke:#9a6700;stroke-width:2;stroke-dasharray:4 3}
.ft-node{fill:#0969da;stroke:#fff;stroke-width:3;paint-order:stroke}.ft-node.ft-ghost{fill:#afb8c1}.ft-node.ft-won{fill:#1a7f37}
.ft-node.ft-bonus{fill:#fff;stroke:#9a6700;stroke-width:2.5;paint-order:normal}
.ft-text.ft-ghost{fill:#818b98}.ft-text.ft-won,.ft-text.ft-bonus{font-weight:bold}
@media (prefers-color-scheme:dark){
.ft-bg{fill:#0d1117}.ft-text{fill:#e6edf3}.ft-note{fill:#8d96a0}
.ft-edge{stroke:#545d68}.ft-edge.ft-ghost{stroke:#2f363e}.ft-edge.ft-won{stroke:#3fb950}
.ft-edge.ft-bonus{stroke:#d29922}
.ft-node{fill:#58a6ff;stroke:#0d1117}.ft-node.ft-ghost{fill:#545d68}.ft-node.ft-won{fill:#3fb950}
.ft-node.ft-bonus{fill:#0d1117;stroke:#d29922}
.ft-text.ft-ghost{fill:#7d8590}
}
"""


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a row is drawn, in pixels, and the row that it hangs on."""

    x: float
    y: float
    parent: int


def as_svg(picture: Picture) -> str:
    """The drawing as SVG text, ready to be a file or to stand inside an HTML page.

    The likeliest path runs straight along the top; a node's area is the probability of its path,
    the accepted path is highlighted, what was rejected is a ghost, and the bonus is a ring.
    """
    spots = _place(picture)
    # what was won is drawn last, over the ghosts
    order = sorted(spots, key=lambda row: (_state(picture, row) in ("won", "bonus"), row))
    edges = [_edge(picture, spots, row) for row in order if row != 0]
    nodes = [_node(picture, spots[row], row) for row in order]
    legend, lowest = _legend(picture), max(spot.y for spot in spots.values())
    rightmost = max(spot.x for spot in spots.values()) + RADIUS
    width = _px(max(rightmost, MARGIN + NOTE_CHAR * len(legend)) + MARGIN)
    height = _px(lowest + LINE * (1.5 if legend else 0.9))
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" \
viewBox="0 0 {width} {height}" role="img" aria-label="{escape(_summary(picture))}">
<style>{STYLE}</style>
<rect class="ft-bg" width="{width}" height="{height}"/>
{_lines(edges)}{_lines(nodes)}\
<text class="ft-note" x="{_px(MARGIN)}" y="{_px(lowest + 1.1 * LINE)}">{legend}</text>
</svg>
"""


def _place(picture: Picture) -> dict[int, _Spot]:
    """Columns by depth; the first branch goes straight on, each further one takes a new line."""
    columns = _columns(picture)
    spots: dict[int, _Spot] = {}
    lines = 0
    waiting = [(0, 0, 0)]  # row, its parent, its depth
    while waiting:
        row, parent, depth = waiting.pop()
        straight_on = row == 0 or row == picture.branches(parent)[0]
        lines += 0 if straight_on else 1
        y = MARGIN + LINE / 2 + LINE * lines
        spots[row] = _Spot(columns[depth], y, parent)
        waiting += [(child, row, depth + 1) for child in reversed(picture.branches(row))]
    return spots


def _columns(picture: Picture) -> list[float]:
    """The x of each depth, with room for the longest label of that depth to its left."""
    depth = list(picture.topology.depth)
    room = [0.0] * (max(depth) + 2)
    for row, level in enumerate(depth):
        room[level] = max(room[level], _width(picture, row))
    if picture.bonus is not None and picture.path is not None:
        room[len(picture.path)] = max(room[len(picture.path)], _width(picture, BONUS))
    x, columns = MARGIN + RADIUS + room[0], [MARGIN + RADIUS + room[0]]
    for width in room[1:]:
        x += SPINE + width + 2 * RADIUS
        columns.append(x)
    return columns


def _edge(picture: Picture, spots: Mapping[int, _Spot], row: int) -> str:
    to, start = spots[row], spots[spots[row].parent]
    line = f"M{_px(start.x)} {_px(start.y)}"
    if to.y != start.y:
        turn, bend = start.x + SPINE, 6.0
        line += f"H{_px(turn - bend)}Q{_px(turn)} {_px(start.y)} {_px(turn)} {_px(start.y + bend)}"
        line += f"V{_px(to.y - bend)}Q{_px(turn)} {_px(to.y)} {_px(turn + bend)} {_px(to.y)}"
    return f'<path class="ft-edge ft-{_state(picture, row)}" d="{line}H{_px(to.x)}"/>'


def _node(picture: Picture, spot: _Spot, row: int) -> str:
    """Circle, label above the line that leads to it, probability below, tooltip over all."""
    state, radius = _state(picture, row), _radius(picture, row)
    left = spot.x - RADIUS - 4
    parts = [
        f'<circle class="ft-node ft-{state}" cx="{_px(spot.x)}" cy="{_px(spot.y)}" '
        f'r="{radius:.2f}"/>'
    ]
    rise = 4 if row == 0 else -6  # the root has no line to stand on
    parts.append(
        f'<text class="ft-text ft-{state}" x="{_px(left)}" y="{_px(spot.y + rise)}" '
        f'text-anchor="end">{escape(_short(picture.label(row)))}</text>'
    )
    if picture.values is not None and row > 0:
        parts.append(
            f'<text class="ft-note" x="{_px(left)}" y="{_px(spot.y + 14)}" '
            f'text-anchor="end">{escape(percent(picture.values[row]))}</text>'
        )
    return f"<g><title>{escape(_tooltip(picture, row))}</title>{''.join(parts)}</g>"


def _state(picture: Picture, row: int) -> str:
    """CSS class: won, bonus, ghost, or plain where nothing was verified."""
    if row == BONUS:
        return "bonus"
    if picture.path is None:
        return "plain"
    return "won" if picture.is_accepted(row) else "ghost"


def _radius(picture: Picture, row: int) -> float:
    if picture.values is None or row == BONUS:
        return PLAIN_RADIUS
    return max(LEAST_RADIUS, RADIUS * math.sqrt(picture.values[row]))


def _tooltip(picture: Picture, row: int) -> str:
    if row == BONUS:
        return f"bonus: {picture.label(row)}, the target's own token"
    said = [f"row {row}: {picture.label(row)}", f"depth {picture.topology.depth[row]}"]
    if row > 0:
        said.append(f"rank {picture.topology.rank[row]}")
    if picture.values is not None:
        said.append(f"path probability {picture.values[row]:.4g}")
    outcome = {"won": ["accepted"], "ghost": ["not taken"]}
    return "\n".join(said + outcome.get(_state(picture, row), []))


def _legend(picture: Picture) -> str:
    said = [] if picture.values is None else ["area: probability of the path"]
    if picture.path is not None:
        said += ["green: accepted", "grey: not taken"]
    return " · ".join(said + ([] if picture.bonus is None else ["ring: bonus"]))


def _summary(picture: Picture) -> str:
    said = f"Draft tree of {picture.topology.nodes} nodes"
    return said if picture.path is None else f"{said}, {len(picture.path) - 1} accepted"


def _short(label: str) -> str:
    return label if len(label) <= LONGEST else label[: LONGEST - 1] + "…"


def _width(picture: Picture, row: int) -> float:
    shown = _short(picture.label(row))
    value = "" if picture.values is None or row <= 0 else percent(picture.values[row])
    cells = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in shown)
    return CHAR * max(cells, len(value)) + 6


def _lines(parts: list[str]) -> str:
    return "".join(f"{part}\n" for part in parts)


def _px(length: float) -> str:
    return f"{length:.1f}".removesuffix(".0")
