"""Lets a command take records of options: each field of a record becomes one flag."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, get_type_hints

__all__ = ["spread"]


@dataclass(frozen=True, slots=True)
class _Group:
    """A parameter of the command, and the flags that fill it."""

    name: str
    record: Callable[..., Any] | None  # None: the flag is passed on as it is
    flags: tuple[inspect.Parameter, ...]

    def value(self, given: dict[str, Any]) -> Any:
        values = {flag.name: given[flag.name] for flag in self.flags}
        return values[self.name] if self.record is None else self.record(**values)


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """The same command with its dataclass parameters spread into flags that typer understands.

    `def bench(prompts: Prompts, draft: DraftFlags)` is then called with the fields of DraftFlags
    as keywords; their annotations carry typer's options, their defaults are the flags' defaults.
    """
    groups = list(_groups(command))
    flags = [flag for group in groups for flag in group.flags]

    def flat(**given: Any) -> None:
        command(**{group.name: group.value(given) for group in groups})

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {flag.name: flag.annotation for flag in flags} | {"return": None}
    vars(flat)["__signature__"] = inspect.Signature(flags)
    return flat


def _groups(command: Callable[..., None]) -> Iterator[_Group]:
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if isinstance(kind, type) and is_dataclass(kind):
            yield _Group(name, kind, tuple(_flags(kind)))
        else:
            flag = _flag(name, kind, parameter.default)
            yield _Group(name, None, (flag,))


def _flags(record: type) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(record, include_extras=True)
    for field in fields(record):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        yield _flag(field.name, hints[field.name], default)


def _flag(name: str, kind: Any, default: Any) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=default, annotation=kind)
