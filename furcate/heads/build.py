"""Builds a head around a target, and fills it with what was stored.

Legend: D draft vocabulary, N tokens by frequency.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from furcate.errors import BadFile, BadRequest
from furcate.heads.held import Held, misfits, problems
from furcate.heads.output import Shared
from furcate.heads.places import Head, make, places
from furcate.heads.spec import HeadSpec
from furcate.heads.tensor_files import REFETCH, Kept, finite
from furcate.models.decoder import Decoder

__all__ = ["build", "can_score", "new_head", "vocabulary"]


def new_head(spec: HeadSpec, target: Decoder, token_D: Tensor | None) -> Head:
    """A head in the target's dtype and on its device; its own weights are uninitialised.

    Args:
        token_D: int64, ascending: the target's id of each draft id; None: all of them.

    Raises:
        BadFile: the head does not fit the target.
    """
    for problem in misfits(spec, target.spec):
        raise problem
    if token_D is not None:
        token_D = token_D.to(target.device, torch.int64)
    size = spec.vocab_size if token_D is None else len(token_D)
    return make(replace(spec, draft_vocab_size=size), Shared.of(target), token_D)


def build(held: Held, target: Decoder, draft_vocab: int | None = None) -> Head:
    """The frozen head, in the target's dtype and on its device.

    Nothing is allocated before names, shapes and ids are known to fit.

    Args:
        draft_vocab: how many of the target's most frequent tokens it scores; None: as stored.

    Raises:
        BadFile: what `problems` and `misfits` find, or numbers that are not finite.
        BadRequest: a draft vocabulary this head cannot have.
    """
    for problem in (*misfits(held.spec, target.spec), *problems(held)):
        raise problem
    head = new_head(held.spec, target, vocabulary(held, draft_vocab))
    for name, place in places(head).items():
        _write(place, held.tensors[name])
    return head.requires_grad_(False)


def vocabulary(held: Held, asked: int | None) -> Tensor | None:
    """token_D of the head that scores `asked` tokens; None where it scores every token.

    Raises BadRequest for a number that this head cannot have.
    """
    stored, vocab = held.spec.draft_vocab_size, held.spec.vocab_size
    if asked is not None and asked < 1:
        raise BadRequest("must be 1 or more", field="draft_vocab", value=asked)
    size = min(stored if asked is None else asked, vocab)
    if held.spec.own_output:
        if size != stored:
            raise BadRequest(
                f"this head scores {stored} tokens with a matrix of its own",
                field="draft_vocab",
                value=asked,
                hint="leave it out",
            )
        return held.token_D
    if size == vocab:
        return None
    listed = 0 if held.frequent_N is None else len(held.frequent_N)
    if held.frequent_N is None or size > listed:
        raise BadRequest(
            f"this head lists {listed} tokens by frequency",
            field="draft_vocab",
            value=size,
            hint=f"give at most {listed}, or {vocab} for all" if listed else "leave it out",
        )
    return held.frequent_N[:size].sort().values


def can_score(held: Held, size: int) -> bool:
    """Whether the head may score `size` tokens instead of the more that it scores as stored."""
    if held.spec.own_output or held.frequent_N is None:
        return False
    return size <= min(len(held.frequent_N), held.spec.draft_vocab_size)


def _write(place: Tensor, kept: Kept) -> None:
    source = kept.read()
    place.copy_(source)
    if finite(place):
        return
    if finite(source):
        raise BadFile(
            f"holds numbers too large for {place.dtype}",
            field=kept.name,
            value=float(source.abs().max()),
            hint="load the target as bfloat16 or float32",
        )
    raise BadFile("holds numbers that are not finite", field=kept.name, hint=REFETCH)
