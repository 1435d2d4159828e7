"""Choose a drafter by its name, and find what it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from furcate.config import DraftOptions
from furcate.drafters.around import CPU_WORDS, around_head, around_model, beside_matches
from furcate.drafters.base import Drafter
from furcate.drafters.draft_cache import Room
from furcate.drafters.honoured import check_honoured
from furcate.drafters.hybrid import HybridDrafter
from furcate.drafters.manner import calibration_of
from furcate.drafters.medusa import MedusaDrafter
from furcate.drafters.ngram import NgramDrafter
from furcate.drafters.off import OffDrafter
from furcate.drafters.recurrent import RecurrentDrafter
from furcate.errors import BadRequest, Unsupported
from furcate.heads.exchange import read_head
from furcate.heads.formats.detect import detect
from furcate.heads.packing import pack
from furcate.heads.store import shipped, shipped_heads
from furcate.kernels.backend import TORCH, Kernels
from furcate.kv.cache import CacheShape
from furcate.models.decoder import Decoder
from furcate.models.load import load_decoder
from furcate.models.zoo import resolve
from furcate.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "NAMES",
    "Setting",
    "Recipe",
    "join_why",
    "kernels_in",
    "make_drafter",
    "recipe_of",
    "room_of",
]

HEADS = ("eagle3", "mtp", "medusa", "eagle1")  # the best first
NAMES = ("off", "ngram", *HEADS, "hybrid")
BESIDE = "ngram+"  # and what the matches stand beside


@dataclass(frozen=True, slots=True)
class Setting:
    """What a drafter is made for."""

    target: Decoder
    tokenizer: Tokenizer
    cache: CacheShape  # of the target
    max_batch: int
    options: DraftOptions
    kernels: Kernels = TORCH
    home: Path | None = None  # of the target: its own module for multi-token prediction is there


@dataclass(frozen=True, slots=True)
class Source:
    """Where a drafter's network comes from."""

    path: Path
    is_head: bool  # of the target's; else it is a smaller model


Recipe = Callable[[int], Drafter]
"""Makes a drafter for so many pages of the target's; its network is loaded once, whatever the
number of drafters made, so that one for a single page may tell what a page costs."""


def make_drafter(which: str | Path, setting: Setting) -> Drafter:
    """What `recipe_of` makes, for the pages of `setting.cache`."""
    return recipe_of(which, setting)(setting.cache.pages)


def recipe_of(which: str | Path, setting: Setting) -> Recipe:
    """How the drafter called `which` is made; the pages of `setting.cache` do not count.

    "off"; "ngram"; a head that comes with furcate for this target ("eagle3", "mtp", ...), "mtp"
    being the target's own where its directory holds one; the directory of a head, which may be the
    target's; the name or path of a smaller model; "ngram+" and one of the last three, "hybrid"
    being n-grams beside EAGLE-3. With `num_draft_tokens` 0 nothing is ever drafted; a network is
    then looked for, not loaded.

    Raises BadRequest for what is not there, a model whose vocabulary is not the target's, and an
    option that this drafter would ignore; also what `resolve`, `load_decoder` and `read_head` do.
    """
    name = BESIDE + HEADS[0] if which == "hybrid" else str(which)
    options, nothing = setting.options, setting.options.num_draft_tokens == 0
    if name in ("off", "ngram"):
        check_honoured(name, name, options)
        light = OffDrafter() if nothing or name == "off" else _matches(options, setting)
        return lambda pages: light
    inner = name.removeprefix(BESIDE)
    source = _find(inner, setting)
    alone = "head" if source.is_head else "model"
    check_honoured(alone if inner == name else "hybrid", name, options)
    if nothing:
        return lambda pages: OffDrafter()
    if inner == name:
        return _around(source, setting)
    # the lengths and widths that were asked for are those of the network's tree
    matches = _matches(options.model_copy(update={"depth": None, "topk": None}), setting)
    network = _around(source, setting, matches.depth)
    return lambda pages: beside_matches(matches, network(pages), room_of(setting, pages))


def kernels_in(drafter: Drafter) -> Kernels | None:
    """What a drafter's own network runs on; None: it has no network, or no keys of its own."""
    if isinstance(drafter, HybridDrafter):
        return kernels_in(drafter.network)
    return drafter.cache.keys.kernels if isinstance(drafter, RecurrentDrafter) else None


def join_why(drafter: Drafter) -> str | None:
    """Why torch joins the pools of two drafters and no kernel does; None: there is no such why."""
    return drafter.join_why if isinstance(drafter, HybridDrafter) else None


def room_of(setting: Setting, pages: int | None = None) -> Room:
    """The sizes that a drafter with a network must follow; `pages` None: those of the cache."""
    return Room(
        capacity=setting.max_batch,
        pages=setting.cache.pages if pages is None else pages,
        page_size=setting.cache.page_size,
        vocab=setting.target.spec.vocab_size,
        device=setting.target.device,
        kernels=setting.kernels,
    )


def _matches(options: DraftOptions, setting: Setting) -> NgramDrafter:
    device, kernels = setting.target.device, setting.kernels
    return NgramDrafter(options, capacity=setting.max_batch, device=device, kernels=kernels)


def _find(which: str, setting: Setting) -> Source:
    """Where the network of that name or path is, checked as far as that can be without loading."""
    if which == "mtp" and setting.home is not None and _holds_a_head(setting.home):
        return Source(setting.home, is_head=True)
    if which in HEADS:
        return Source(_shipped(which, setting.tokenizer), is_head=True)
    folder = Path(which).expanduser()
    if _holds_a_head(folder):
        return Source(folder, is_head=True)
    path = resolve(which)
    _check_same_tokens(which, load_tokenizer(path), setting.tokenizer)
    return Source(path, is_head=False)


def _holds_a_head(folder: Path) -> bool:
    """Whether it holds a head of any known format, and not only a model of its own."""
    if not folder.is_dir():
        return False
    try:
        detect(folder)
    except Unsupported:
        return False
    return True


def _around(
    source: Source, setting: Setting, longest: int | None = None
) -> Callable[[int], RecurrentDrafter | MedusaDrafter]:
    """The network is loaded now."""
    target, options = setting.target, setting.options
    if source.is_head:
        fingerprint = setting.tokenizer.fingerprint()
        most = CPU_WORDS if target.device.type == "cpu" else None
        head = read_head(
            source.path, target, options.draft_vocab, fingerprint=fingerprint, most=most
        )
        pack(head)
        fitted = calibration_of(source.path)
        return lambda pages: around_head(head, options, room_of(setting, pages), fitted, longest)
    decoder = load_decoder(source.path, target.dtype, target.device)
    if decoder.can_pack:
        decoder.pack()
    return lambda pages: around_model(decoder, options, room_of(setting, pages), longest)


def _shipped(name: str, tokenizer: Tokenizer) -> Path:
    found = shipped(name, tokenizer.fingerprint())
    if found is not None:
        return found
    there = ", ".join(f"{head.name} for {head.target}" for head in shipped_heads()) or "none"
    raise BadRequest(
        "no head of this name comes with furcate for this target",
        field="drafter",
        value=name,
        hint=f"give the directory of one, or train one; there are: {there}",
    )


def _check_same_tokens(which: str, drafter: Tokenizer, target: Tokenizer) -> None:
    if drafter.fingerprint() == target.fingerprint():
        return
    names = ", ".join(NAMES)
    raise BadRequest(
        "the drafter's vocabulary is not the target's",
        field="drafter",
        value=which,
        hint=f"use a model of the same family, or one of: {names}",
    )
