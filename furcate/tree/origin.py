"""Where a number was born: device, commit, date, and whether it was measured or assumed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Literal

from furcate.errors import BadRequest
from furcate.tree.stored import fields_of, reading, text

__all__ = ["KINDS", "Kind", "Origin"]

Kind = Literal["measured", "fitted", "published", "assumed"]
KINDS: tuple[Kind, ...] = ("measured", "fitted", "published", "assumed")
_FIELDS = ("device", "commit", "date", "kind")


@dataclass(frozen=True, slots=True)
class Origin:
    """Stands beside every number that furcate keeps or shows.

    Args:
        device: the device's name, such as "NVIDIA H200".
        commit: commit of the code that took it; for a published number, its source.
        date: day, as YYYY-MM-DD.
        kind: measured, fitted, published or assumed.
    """

    device: str
    commit: str
    date: str
    kind: Kind

    def __post_init__(self) -> None:
        for field, value in (("device", self.device), ("commit", self.commit)):
            if not value:
                raise BadRequest("must not be empty", field=field, value=value)
        _known_kind(self.kind)
        _check_date(self.date)

    def to_dict(self) -> dict[str, object]:
        """A JSON object."""
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_dict(cls, data: object) -> Origin:
        """The inverse of `to_dict`; raises BadFile."""
        with reading("origin"):
            found = fields_of(data, _FIELDS)
            device, commit, day = (text(found[name], name) for name in _FIELDS[:3])
            return cls(device, commit, day, _known_kind(found["kind"]))


def _known_kind(data: object) -> Kind:
    for kind in KINDS:
        if data == kind:
            return kind
    raise BadRequest(f"must be one of {', '.join(KINDS)}", field="kind", value=data)


def _check_date(day: str) -> None:
    try:
        date.fromisoformat(day)
    except ValueError:
        raise BadRequest("must be a day such as 2026-12-01", field="date", value=day) from None
