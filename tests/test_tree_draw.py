"""Drawings: every row is there once, text is made safe, nothing reaches out."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furcate.errors import BadRequest
from furcate.tree.draw import Picture, as_text, percent, visible
from furcate.tree.svg import as_svg
from furcate.tree.topology import Topology

SVG = "{http://www.w3.org/2000/svg}"
SMALL = Picture(
    Topology.from_choices([[0], [0, 0], [0, 1], [1]]),
    labels=["Why", " is", " the", " it", "\n"],
    values=[1.0, 0.6, 0.4, 0.125, 0.03],
    path=[0, 1, 3],
    bonus=" so",
)


def elements(svg: str, kind: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(SVG + kind))


@st.composite
def pictures(draw: st.DrawFn) -> Picture:
    nodes = draw(st.integers(0, 40))
    topology = Topology.from_parents([-1, *(draw(st.integers(0, row)) for row in range(nodes))])
    rows = topology.rows
    labels = draw(st.none() | st.lists(st.text(max_size=30), min_size=rows, max_size=rows))
    values = draw(st.none() | st.lists(st.floats(0, 1), min_size=rows, max_size=rows))
    path = draw(st.none() | st.integers(0, nodes).map(topology.path))
    bonus = None if path is None else draw(st.none() | st.text(max_size=30))
    return Picture(topology, labels, values, path, bonus)


def test_a_small_tree_as_text() -> None:
    assert as_text(SMALL) == (
        "● Why\n"
        "├─ ● ␣is  60%\n"
        "│  ├─ ○ ␣the  40%\n"
        "│  └─ ● ␣it  12%\n"
        "│     └─ ★ ␣so\n"
        "└─ ○ \\n  3.0%\n"
    )


def test_a_shape_alone_as_text() -> None:
    assert as_text(Picture(Topology.star(2))) == "row 0\n├─ row 1\n└─ row 2\n"


@settings(deadline=None)
@given(pictures())
def test_every_row_is_one_line_of_text(picture: Picture) -> None:
    lines = as_text(picture).splitlines()
    assert len(lines) == picture.topology.rows + (picture.bonus is not None)
    assert sum("●" in line[:-1] for line in lines) >= len(picture.path or ())


@settings(deadline=None)
@given(pictures())
def test_every_row_is_one_node_of_the_svg(picture: Picture) -> None:
    svg = as_svg(picture)
    drawn = picture.topology.rows + (picture.bonus is not None)
    assert len(elements(svg, "circle")) == drawn
    assert len(elements(svg, "title")) == drawn
    assert len(elements(svg, "path")) == drawn - 1


@settings(deadline=None)
@given(pictures())
def test_no_two_nodes_share_a_spot_and_all_lie_inside(picture: Picture) -> None:
    svg = as_svg(picture)
    root = ElementTree.fromstring(svg)
    spots = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in elements(svg, "circle")]
    assert len(set(spots)) == len(spots)
    assert all(0 < x < float(root.attrib["width"]) for x, _ in spots)
    assert all(0 < y < float(root.attrib["height"]) for _, y in spots)


def test_the_area_of_a_node_is_its_probability() -> None:
    radius = sorted(float(c.attrib["r"]) for c in elements(as_svg(SMALL), "circle"))
    assert radius[-1] ** 2 * 0.6 == pytest.approx(radius[-2] ** 2, rel=0.01)
    assert radius[-1] ** 2 * 0.4 == pytest.approx(radius[-3] ** 2, rel=0.01)


def test_the_accepted_path_is_highlighted_and_the_rest_is_a_ghost() -> None:
    states = [c.attrib["class"] for c in elements(as_svg(SMALL), "circle")]
    assert states.count("ft-node ft-won") == 3
    assert states.count("ft-node ft-ghost") == 2
    assert states.count("ft-node ft-bonus") == 1


def test_hostile_tokens_stay_text() -> None:
    hostile = ['</text><script>alert("x")</script>', "&lt;", "\x00\x1b[31m", "\ud800", "\u202e"]
    picture = Picture(Topology.chain(4), labels=hostile)
    svg = as_svg(picture)
    svg.encode("utf-8")
    assert not elements(svg, "script")
    assert elements(svg, "title")[0].text == f"row 0: {hostile[0]}\ndepth 0"
    assert "\x1b" not in as_text(picture)


def test_the_svg_is_light_and_dark_and_asks_nobody() -> None:
    svg = as_svg(SMALL)
    assert "prefers-color-scheme:dark" in svg
    addresses = re.findall(r"\w+://[^\"\s]+", svg)
    assert addresses == ["http://www.w3.org/2000/svg"]  # the name of the format, never fetched
    assert not re.search(r"href|url\(|@import|<script|<image", svg)


def test_long_labels_are_cut_in_the_drawing_and_whole_in_the_tooltip() -> None:
    long = "antidisestablishmentarianism"
    svg = as_svg(Picture(Topology.chain(1), labels=["a", long]))
    assert all(long not in (text.text or "") for text in elements(svg, "text"))
    assert any(long in (title.text or "") for title in elements(svg, "title"))


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" a b ", "␣a b␣"),
        ("  ", "␣␣"),
        ("\t", "\\t"),
        ("", ""),
        ("空", "空"),
        ("\u200b", "\\u200b"),
    ],
)
def test_a_token_is_shown_on_one_line(token: str, shown: str) -> None:
    assert visible(token) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.0, "100%"),
        (0.996, "100%"),
        (0.5, "50%"),
        (0.0996, "10%"),
        (0.034, "3.4%"),
        (0.0001, "<0.1%"),
        (0.0, "0%"),
    ],
)
def test_percentages_show_what_they_know(value: float, shown: str) -> None:
    assert percent(value) == shown


@pytest.mark.parametrize(
    ("given_", "field"),
    [
        ({"labels": ["a"]}, "labels"),
        ({"values": [1.0]}, "values"),
        ({"values": [1.0, 2.0, 0.1]}, r"values\[1\]"),
        ({"path": [0, 2]}, "path"),
        ({"path": []}, "path"),
        ({"path": [0, 1, 2, 2]}, "path"),
        ({"path": [0, 9]}, "path"),
        ({"bonus": "x"}, "bonus"),
    ],
)
def test_a_picture_that_does_not_fit_its_tree_is_refused(
    given_: dict[str, list[int]], field: str
) -> None:
    with pytest.raises(BadRequest, match=field):
        Picture(Topology.chain(2), **given_)  # type: ignore[arg-type]
