"""The tree of fixed ranks that was asked for: spelled out, in a file, or the best of a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from furcate.errors import BadFile, BadRequest
from furcate.tree.static import best_static_tree
from furcate.tree.stored import fields_of, list_of, numbers, reading, whole_numbers
from furcate.tree.topology import Topology

__all__ = ["chosen_tree", "json_of"]


def chosen_tree(tree: str | Sequence[Sequence[int]]) -> Topology:
    """The tree of these rank paths, or of a JSON file.

    The file holds a list of rank paths, as Medusa's `medusa_choices` do, or an object with
    "acceptance", a table by depth and rank, and "nodes": the best tree for the table is then made.
    Raises BadRequest or BadFile.
    """
    found = _in_file(Path(tree)) if isinstance(tree, str) else Topology.from_choices(tree)
    if not found.nodes:
        raise BadRequest("has no node", field="tree", value=tree, hint="'off' drafts nothing")
    return found


def json_of(file: Path) -> object:
    """What a JSON file holds; raises BadFile."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as err:
        raise BadFile(err.strerror or "cannot be read", field=str(file)) from None
    except ValueError as err:
        raise BadFile(f"is not JSON: {err}", field=str(file)) from None


def _in_file(file: Path) -> Topology:
    found = json_of(file)
    with reading(str(file)):
        if isinstance(found, list):
            paths = [whole_numbers(path, f"[{i}]") for i, path in enumerate(found)]
            return Topology.from_choices(paths)
        table = fields_of(found, ("acceptance", "nodes"))
        rows = list_of(table["acceptance"], "acceptance")
        acceptance = [numbers(row, f"acceptance[{i}]") for i, row in enumerate(rows)]
        (nodes,) = whole_numbers([table["nodes"]], "nodes")
        return best_static_tree(acceptance, nodes).topology
