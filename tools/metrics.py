"""Prints the figures that CONTRIBUTING.md aims at: lengths, parameters, comments, docstrings."""

from __future__ import annotations

import ast
from statistics import median, quantiles

from source_files import functions, lines_of, modules, name_of, parameters_of, parsed


def comment_lines(source: str) -> int:
    return sum(line.lstrip().startswith("#") for line in source.splitlines())


def docstring_lines(tree: ast.Module) -> int:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return sum(len(doc.splitlines()) for doc in docs if doc)


def report() -> list[str]:
    sources = {name_of(file): file.read_text(encoding="utf-8") for file in modules()}
    told = [(name_of(file), fn) for file in modules() for fn in functions(parsed(file))]
    sizes = sorted(((lines_of(fn), f"{where} {fn.name}") for where, fn in told), reverse=True)
    lengths = [size for size, _ in sizes]
    files = sorted(((text.count("\n"), name) for name, text in sources.items()), reverse=True)
    written = sum(bool(line.strip()) for text in sources.values() for line in text.splitlines())
    wide = [f"{where} {fn.name}" for where, fn in told if parameters_of(fn) > 6]
    comments = sum(comment_lines(text) for text in sources.values())
    docs = sum(docstring_lines(parsed(file)) for file in modules())
    return [
        f"files       {len(files)}, median {median(n for n, _ in files):g} lines",
        f"  largest   {', '.join(f'{name} {n}' for n, name in files[:3])}",
        f"functions   {len(lengths)}, median {median(lengths):g} lines, "
        f"p90 {quantiles(lengths, n=10)[-1]:.0f}, over 50: {sum(n > 50 for n in lengths)}",
        f"  longest   {', '.join(f'{where} {n}' for n, where in sizes[:3])}",
        f"parameters  more than 6: {', '.join(wide) or 'none'}",
        f"comments    {100 * comments / written:.1f} per 100 written lines",
        f"docstrings  {100 * docs / written:.1f} per 100 written lines",
    ]


if __name__ == "__main__":
    print("\n".join(report()))
