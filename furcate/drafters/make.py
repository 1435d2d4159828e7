"""Choose a drafter by its name, or build one around a model that speaks the target's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from furcate.config import DraftOptions
from furcate.drafters.base import Drafter
from furcate.drafters.model import ModelDrafter, Room
from furcate.drafters.ngram import NgramDrafter
from furcate.drafters.off import OffDrafter
from furcate.errors import BadRequest
from furcate.kv.cache import CacheShape
from furcate.models.decoder import Decoder
from furcate.models.load import load_decoder
from furcate.models.zoo import resolve
from furcate.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["NAMES", "Setting", "make_drafter"]

NAMES = ("off", "ngram")
LOOKUP = ("prompt_lookup_max", "prompt_lookup_min")


@dataclass(frozen=True, slots=True)
class Setting:
    """What a drafter is made for."""

    target: Decoder
    tokenizer: Tokenizer
    cache: CacheShape  # of the target
    max_batch: int
    options: DraftOptions


def make_drafter(which: str | Path, setting: Setting) -> Drafter:
    """The drafter called `which` (`NAMES`), or one around the model of that name or path.

    `num_draft_tokens` 0 means that nothing is ever drafted; a model is then looked at, not loaded.
    Raises BadRequest for a model whose vocabulary is not the target's, and what `resolve` and
    `load_decoder` raise.
    """
    _check_honoured(which, setting.options)
    nothing = setting.options.num_draft_tokens == 0
    device = setting.target.device
    if which == "off" or (which == "ngram" and nothing):
        return OffDrafter()
    if which == "ngram":
        return NgramDrafter(setting.options, capacity=setting.max_batch, device=device)
    path = resolve(which)
    _check_same_tokens(which, load_tokenizer(path), setting.tokenizer)
    if nothing:
        return OffDrafter()
    decoder = load_decoder(path, setting.target.dtype, device)
    if decoder.can_pack:
        decoder.pack()
    return ModelDrafter(decoder, setting.options, room_of(setting))


def room_of(setting: Setting) -> Room:
    """The sizes that a model drafter must follow."""
    return Room(
        capacity=setting.max_batch,
        pages=setting.cache.pages,
        page_size=setting.cache.page_size,
        vocab=setting.target.spec.vocab_size,
        device=setting.target.device,
    )


def _check_honoured(which: str | Path, options: DraftOptions) -> None:
    """An option that this drafter would ignore is refused by name."""
    asked = options.model_fields_set & set(LOOKUP)
    if which == "off":
        asked |= {name for name in ("depth", "topk") if getattr(options, name) is not None}
        asked |= {"num_draft_tokens"} if options.num_draft_tokens else set()
    if asked and which != "ngram":
        name = min(asked)
        raise BadRequest(
            f"means nothing to the drafter {str(which)!r}",
            field=name,
            value=getattr(options, name),
            hint="leave it out, or use the drafter 'ngram'",
        )


def _check_same_tokens(which: str | Path, drafter: Tokenizer, target: Tokenizer) -> None:
    if drafter.fingerprint() == target.fingerprint():
        return
    names = ", ".join(NAMES)
    raise BadRequest(
        "the drafter's vocabulary is not the target's",
        field="drafter",
        value=str(which),
        hint=f"use a model of the same family, or one of: {names}",
    )
