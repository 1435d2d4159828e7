"""Which heads are trained for a target when nothing else is asked: their sizes and layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from furcate.heads.spec import EagleSpec, HeadSpec, MedusaSpec, MtpSpec
from furcate.models.spec import DecoderSpec
from furcate.train.recipe import HeadPlan

__all__ = ["KINDS", "Shape", "plans"]

KINDS = ("eagle3", "mtp", "medusa", "eagle1")


@dataclass(frozen=True, slots=True)
class Shape:
    """What may be chosen about heads.

    Attributes:
        steps: how deep recurrent heads are unrolled in training.
        intermediate_size: of their MLP; None: the target's.
        layers: the features EAGLE-3 reads, counted as transformers' `hidden_states` are; None: the
            reference code's choice, near the bottom, the middle and the top.
        medusa_heads: how many tokens Medusa guesses.
        medusa_layers: residual blocks of each of its heads.
        draft_vocab: tokens that a head proposes by default.
    """

    steps: int = 6
    intermediate_size: int | None = None
    layers: tuple[int, ...] | None = None
    medusa_heads: int = 4
    medusa_layers: int = 1
    draft_vocab: int = 16_384


def plans(kinds: Sequence[str], target: DecoderSpec, shape: Shape) -> tuple[HeadPlan, ...]:
    """A plan for each kind, named after it."""
    return tuple(_plan(kind, target, shape) for kind in kinds)


def eagle3_layers(num_layers: int) -> tuple[int, ...]:
    """2, half, and three below the top (EAGLE-3's reference code), where there are so many."""
    return tuple(sorted({min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)}))


def _plan(kind: str, target: DecoderSpec, shape: Shape) -> HeadPlan:
    spec = _spec(kind, target, shape)
    return HeadPlan(kind, spec, shape.medusa_heads if kind == "medusa" else shape.steps)


def _spec(kind: str, target: DecoderSpec, shape: Shape) -> HeadSpec:
    last, size = (target.num_layers,), target.hidden_size
    vocab, draft = target.vocab_size, min(shape.draft_vocab, target.vocab_size)
    if kind == "medusa":
        return MedusaSpec(size, vocab, shape.medusa_heads, shape.medusa_layers, last, draft)
    block = replace(
        target,
        num_layers=1,
        rope_layers=(True,),
        intermediate_size=shape.intermediate_size or target.intermediate_size,
    )
    if kind == "mtp":
        return MtpSpec(block, last, draft)
    if kind == "eagle1":
        return EagleSpec("eagle1", block, size, last, draft)
    layers = shape.layers or eagle3_layers(target.num_layers)
    return EagleSpec("eagle3", block, size, layers, draft)
