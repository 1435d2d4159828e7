"""Which drafting options each kind of drafter follows; whatever it would ignore is refused."""

from __future__ import annotations

from furcate.config import DraftOptions
from furcate.errors import BadRequest

__all__ = ["check_honoured"]

_ALWAYS = {"num_draft_tokens", "adaptive"}
_LOOKUP = {"prompt_lookup_max", "prompt_lookup_min"}
_SIZES = {"depth", "topk"}
_PRUNING = {"value_threshold", "entropy_children", "entropy_gate"}
_GROWTH = {"tree", "beta", "sigma", "coupled"} | _PRUNING
_HONOURED = {
    "off": _ALWAYS,
    "ngram": _ALWAYS | _SIZES | _LOOKUP,
    "model": _ALWAYS | _SIZES | _GROWTH,
    "head": _ALWAYS | _SIZES | _GROWTH | {"draft_vocab"},
    "hybrid": _ALWAYS | _SIZES | _GROWTH | _LOOKUP | {"draft_vocab"},
}


def check_honoured(kind: str, which: str, options: DraftOptions) -> None:
    """Raises BadRequest for an option that a drafter of this kind, called `which`, would ignore."""
    asked = {name for name in options.model_fields_set if getattr(options, name) is not None}
    ignored = asked - _HONOURED[kind]
    if kind == "off" and options.num_draft_tokens:
        ignored.add("num_draft_tokens")
    if not ignored:
        return
    name = min(ignored)
    users = ", ".join(repr(other) for other, names in _HONOURED.items() if name in names)
    raise BadRequest(
        f"means nothing to the drafter {which!r}",
        field=name,
        value=getattr(options, name),
        hint=f"leave it out, or use a drafter of the kind {users}",
    )
