"""Choose a drafter: by name, or around a decoder that the caller has loaded."""

from __future__ import annotations

from furcate.config import DraftOptions
from furcate.drafters.base import Drafter
from furcate.drafters.model import ModelDrafter, Room
from furcate.drafters.ngram import NgramDrafter
from furcate.drafters.off import OffDrafter
from furcate.errors import BadRequest
from furcate.models.decoder import Decoder

__all__ = ["NAMES", "make_drafter"]

NAMES = ("off", "ngram")


def make_drafter(which: str | Decoder, options: DraftOptions, room: Room) -> Drafter:
    """The drafter called `which`, or a model drafter around that decoder.

    Whoever loads a decoder has compared the two vocabularies. `num_draft_tokens` 0 means that
    nothing is ever drafted. Raises BadRequest for an unknown name.
    """
    if isinstance(which, str) and which not in NAMES:
        known = ", ".join(NAMES)
        raise BadRequest("unknown drafter", field="drafter", value=which, hint=f"known: {known}")
    if which == "off" or options.num_draft_tokens == 0:
        return OffDrafter()
    if isinstance(which, str):
        return NgramDrafter(options, capacity=room.capacity, device=room.device)
    return ModelDrafter(which, options, room)
