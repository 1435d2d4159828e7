"""What a drafter is, in the words and numbers of a report."""

from __future__ import annotations

from typing import Any

from furcate.drafters.base import Drafter
from furcate.drafters.hybrid import HybridDrafter
from furcate.drafters.medusa import MedusaDrafter
from furcate.drafters.model import ModelNetwork
from furcate.drafters.ngram import NgramDrafter
from furcate.drafters.off import OffDrafter
from furcate.drafters.plan import Plan
from furcate.drafters.recurrent import RecurrentDrafter
from furcate.heads.places import Head

__all__ = ["described", "kind_of"]

_KINDS: dict[type, str] = {
    OffDrafter: "off",
    NgramDrafter: "ngram",
    HybridDrafter: "hybrid",
    MedusaDrafter: "medusa",
}


def described(drafter: Drafter) -> dict[str, Any]:
    """A drafter's kind, and the sizes of its trees, as a JSON object.

    `depth` is the deepest level, `width` the most children of a node (n-grams: the most matches
    followed), `pool` the nodes of a proposal, before the best are chosen; `draft_vocab` the tokens
    that a network can propose, `layers` the states of the target that it reads. A hybrid tells its
    two parts.
    """
    record = {"kind": kind_of(drafter), "depth": drafter.depth, "pool": drafter.pool}
    if isinstance(drafter, HybridDrafter):
        parts = {"network": drafter.network, "matches": drafter.ngram}
        return record | {name: described(part) for name, part in parts.items()}
    if isinstance(drafter, NgramDrafter):
        return record | {"width": drafter.matches}
    if isinstance(drafter, MedusaDrafter | RecurrentDrafter):
        record |= {"width": _width(drafter.plan), "draft_vocab": _draft_vocab(drafter)}
        return record | {"layers": list(drafter.layers)}
    return record


def kind_of(drafter: Drafter) -> str:
    """off, ngram, hybrid, model, or the kind of a head; a class's name for a drafter of others."""
    if isinstance(drafter, RecurrentDrafter):
        network = drafter.network
        if isinstance(network, ModelNetwork):
            return "model"
        if isinstance(network, Head):
            return network.spec.kind
    return _KINDS.get(type(drafter), type(drafter).__name__)


def _width(plan: Plan) -> int:
    return max(step.children for step in plan)


def _draft_vocab(drafter: MedusaDrafter | RecurrentDrafter) -> int:
    network = drafter.heads if isinstance(drafter, MedusaDrafter) else drafter.network
    if network.token_D is not None:
        return len(network.token_D)
    return network.spec.vocab_size if isinstance(network, Head) else network.vocab
