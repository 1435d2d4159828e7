"""Writes the README's file map from the files' own first lines; `make map` calls it."""

from __future__ import annotations

import sys

from source_files import ROOT, modules, name_of, promise

README = ROOT / "README.md"
BEGIN, END = "<!-- map: made by `make map` -->", "<!-- end of map -->"


def map_lines() -> list[str]:
    """One line a file: its path, then its promise."""
    width = max(len(name_of(file)) for file in modules())
    return [f"{name_of(file):<{width}}  {promise(file)}" for file in modules()]


def told_lines(readme: str) -> list[str]:
    """What the README says now."""
    block = readme.split(BEGIN, 1)[1].split(END, 1)[0]
    return [line for line in block.splitlines() if line.startswith("furcate/")]


def with_map(readme: str) -> str:
    head, rest = readme.split(BEGIN, 1)
    tail = rest.split(END, 1)[1]
    block = "\n".join(["", "```text", *map_lines(), "```", ""])
    return f"{head}{BEGIN}{block}{END}{tail}"


if __name__ == "__main__":
    text = with_map(README.read_text(encoding="utf-8"))
    if "--write" in sys.argv[1:]:
        README.write_text(text, encoding="utf-8")
    else:
        print("\n".join(map_lines()))
