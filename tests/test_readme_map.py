"""The README's file map equals the disk."""

from __future__ import annotations

from readme_map import README, map_lines, told_lines, with_map


def test_the_map_matches_the_disk() -> None:
    told = told_lines(README.read_text(encoding="utf-8"))
    assert told == map_lines(), "run `make map`"


def test_a_stale_map_is_noticed() -> None:
    readme = README.read_text(encoding="utf-8").replace("furcate/errors.py ", "furcate/error.py ")
    assert told_lines(readme) != map_lines()


def test_writing_the_map_keeps_the_rest_of_the_readme() -> None:
    readme = README.read_text(encoding="utf-8")
    again = with_map(readme)
    assert again.split("<!-- map")[0] == readme.split("<!-- map")[0]
    assert again.split("<!-- end")[1] == readme.split("<!-- end")[1]
