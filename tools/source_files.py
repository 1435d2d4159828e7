"""The package's files as a reader of the source sees them: names, promises, syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "furcate"


def modules() -> list[Path]:
    """Every module of the package, folder by folder, `__init__` first."""
    return sorted(PACKAGE.rglob("*.py"), key=lambda f: (f.parent.as_posix(), f.name))


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=name_of(file))


def promise(file: Path) -> str:
    """The first line of a module's docstring: its one responsibility."""
    return (ast.get_docstring(parsed(file)) or "").split("\n", 1)[0].strip()


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the last statement, the docstring left out."""
    body = function.body
    told = ast.get_docstring(function) is not None
    doc = (body[0].end_lineno or 0) - body[0].lineno + 1 if told else 0
    return (function.end_lineno or 0) - function.lineno + 1 - doc


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [arg.arg for arg in function.args.posonlyargs + function.args.args]
    return len([n for n in names if n not in ("self", "cls")]) + len(function.args.kwonlyargs)
