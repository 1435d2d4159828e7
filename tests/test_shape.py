"""The shape of the source: promises, lengths, and what must not appear."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest
import torch

from source_files import functions, lines_of, modules, name_of, parsed, promise

MOST_LINES = 400
MOST_FUNCTION_LINES = 50
MOST_LONG_SHARE = 0.03
FORBIDDEN_WORDS = ("TODO", "FIXME", "NotImplementedError")

FILES = modules()


def _unless_triton(files: list[Path]) -> list[Path]:
    return [file for file in files if not file.stem.endswith("_triton")]


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_module_opens_with_its_one_line_promise(file: Path) -> None:
    line = promise(file)
    assert line.endswith((".", ":")), f"say in one line what {name_of(file)} is for"
    assert len(line) <= 110


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_module_is_longer_than_a_reader_holds(file: Path) -> None:
    assert file.read_text(encoding="utf-8").count("\n") <= MOST_LINES


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_star_import_and_no_global(file: Path) -> None:
    for node in ast.walk(parsed(file)):
        assert not isinstance(node, ast.Global | ast.Nonlocal), f"line {node.lineno}"
        starred = isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names)
        assert not starred


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_nothing_is_left_for_later(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    assert [word for word in FORBIDDEN_WORDS if word in source] == []


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_annotations_are_read_lazily(file: Path) -> None:
    written = [node for node in parsed(file).body if not isinstance(node, ast.Expr)]
    if written:
        first = written[0]
        assert isinstance(first, ast.ImportFrom)
        assert first.module == "__future__"


def test_long_functions_are_rare() -> None:
    lengths = [
        (lines_of(fn), f"{name_of(file)}:{fn.name}")
        for file in _unless_triton(FILES)
        for fn in functions(parsed(file))
    ]
    long = [where for lines, where in lengths if lines > MOST_FUNCTION_LINES]
    assert len(long) <= MOST_LONG_SHARE * len(lengths), long


def test_no_tuple_of_four_is_returned() -> None:
    wide = [
        f"{name_of(file)}:{node.lineno}"
        for file in _unless_triton(FILES)
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Return)
        and isinstance(node.value, ast.Tuple)
        and len(node.value.elts) > 3
    ]
    assert wide == []


def test_unwritten_memory_is_poisoned_inside_the_package_only() -> None:
    source = "made = [torch.empty(3), torch.empty_like(one), one.new_empty(2)]"
    inside, outside = ModuleType("furcate.probe"), ModuleType("elsewhere")
    for module in (inside, outside):
        vars(module).update(torch=torch, one=torch.ones(2))
        exec(source, vars(module))
    assert all(t.isnan().all() for t in inside.made)
    assert torch.empty(2, dtype=torch.int64).dtype == torch.int64
