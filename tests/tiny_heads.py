"""Random heads on the tiny float64 target, drafters around them, and what they should keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from small_models import fill_randomly
from tiny_engine import DRAFT, VOCAB, Script, decoder
from torch import Tensor

from furcate.config import DraftOptions, EngineOptions
from furcate.drafters.around import around_head, beside_matches
from furcate.drafters.draft_cache import Room
from furcate.drafters.hybrid import HybridDrafter
from furcate.drafters.ngram import NgramDrafter
from furcate.engine.build import DEFAULT_KV_TOKENS
from furcate.engine.naive import _attention
from furcate.heads.eagle import Eagle1, Eagle3
from furcate.heads.medusa import Medusa
from furcate.heads.mtp import Mtp
from furcate.heads.output import Shared
from furcate.heads.recurrent import KvSizes
from furcate.heads.spec import EagleSpec, MedusaSpec, MtpSpec
from furcate.models.causal import causal_attend
from furcate.models.decoder import Attend

RECURRENT = ("eagle1", "eagle3", "mtp")
SEED = 5
KINDS = (*RECURRENT, "medusa")
SMALL_VOCAB = tuple(range(3, VOCAB, 2))  # every other token


@cache
@torch.inference_mode(False)  # tests of training get the same one
def network(kind: str, small_vocab: bool = False, max_position: int = 512) -> Any:
    """A random head in float64; hardly any of its guesses is good."""
    target = decoder()
    token_D = torch.tensor(SMALL_VOCAB) if small_vocab else None
    shared, last = Shared.of(target), target.spec.num_layers
    sizes = VOCAB if token_D is None else len(token_D)
    made: Any
    if kind == "medusa":
        sized = MedusaSpec(target.spec.hidden_size, VOCAB, 4, 2, (last,), sizes)
        made = Medusa(sized, shared, token_D)
        fill_randomly(dict(made.named_parameters()), SEED)
        return made.requires_grad_(False)
    block = replace(target.spec, num_layers=1, rope_layers=(True,), intermediate_size=40)
    block = replace(block, max_position=max_position)
    if kind == "mtp":
        made = Mtp(MtpSpec(block, (last,), sizes), shared, token_D)
    elif kind == "eagle1":
        spec = EagleSpec("eagle1", block, block.hidden_size, (last,), sizes, fc_bias=True)
        made = Eagle1(spec, shared, token_D)
    else:
        spec = EagleSpec("eagle3", block, block.hidden_size, (0, 1, last), sizes, fc_norm=True)
        made = Eagle3(spec, shared, token_D)
    fill_randomly(dict(made.named_parameters()), SEED)
    return made.requires_grad_(False)


def room_of(**options: Any) -> Room:
    """Of an engine with these options around the tiny target."""
    asked = EngineOptions(**options)
    pages = -(-(asked.kv_tokens or DEFAULT_KV_TOKENS) // asked.page_size)
    return Room(asked.max_batch, pages, asked.page_size, VOCAB, torch.device("cpu"))


def around(head: Any, draft: dict[str, Any] | None = None, **options: Any) -> Any:
    """A drafter around a head; `draft` changes the options of `tiny_engine`'s trees."""
    return around_head(head, DraftOptions(**{**DRAFT, **(draft or {})}), room_of(**options))


def beside(head: Any, draft: dict[str, Any] | None = None, **options: Any) -> HybridDrafter:
    """N-gram matches beside that drafter."""
    how = DraftOptions(**{**DRAFT, **(draft or {})})
    room = room_of(**options)
    ngram = NgramDrafter(DraftOptions(), capacity=room.capacity, device=room.device)
    return beside_matches(ngram, around_head(head, how, room, longest=ngram.depth), room)


class Knowing:
    """A head of a `Script` that is always right, as long as it is fed with the state before.

    The script's state at a position is the position, and what it says next depends on that alone.
    """

    layers = (1,)
    state_size = 1
    kv = KvSizes(layers=1, heads=1, kv_heads=1, head_dim=2)
    vocab = VOCAB
    dtype = torch.float64

    def __init__(self, script: Script, tokens: Sequence[int] | None = None) -> None:
        self.script = script
        self.token_D = None if tokens is None else torch.tensor(tokens)

    def fuse(self, features_TF: Tensor) -> Tensor:
        return features_TF

    def __call__(
        self, tokens_T: Tensor, state_TC: Tensor, positions_T: Tensor, attend: Attend
    ) -> Tensor:
        row_TKD = torch.ones(len(tokens_T), 1, 2, dtype=self.dtype)
        attend(0, row_TKD, row_TKD, row_TKD)
        return state_TC + 1

    def logits(self, state_TC: Tensor) -> Tensor:
        logits_TV = self.script.logits(state_TC)
        return logits_TV if self.token_D is None else logits_TV[:, self.token_D]


@dataclass(frozen=True)
class Forced:
    """What a teacher-forced head keeps of a text: entry p - 1 is position p, from 1 on."""

    k_LTKD: Tensor
    v_LTKD: Tensor
    state_TC: Tensor  # of positions 0, 1, ...
    out_TC: Tensor  # outputs at positions 1, 2, ...


def forced(head: Any, text: Sequence[int]) -> Forced:
    """One causal pass of the target and one of the head over a whole text."""
    tokens_T, at_T = torch.tensor(list(text)), torch.arange(len(text))
    features_TF = decoder().states(tokens_T, at_T, causal_attend, head.layers).features_TF
    state_TC = head.fuse(features_TF)
    kept: list[tuple[Tensor, Tensor]] = []

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        kept.append((k_TKD, v_TKD))
        return causal_attend(layer, q_THD, k_TKD, v_TKD)

    out_TC = head(tokens_T[1:], state_TC[:-1], at_T[1:], attend)
    k, v = (torch.stack(each) for each in zip(*kept, strict=True))
    return Forced(k, v, state_TC, out_TC)


def unrolled(head: Any, text: Sequence[int], path: Sequence[int]) -> list[Tensor]:
    """Scores at the root (the last of `text`) and below each token of a path: [D] each.

    Below the root the head is fed with what it gave itself, its keys being all it has kept.
    """
    at_root = forced(head, text)
    k_LTKD, v_LTKD, out_1C = at_root.k_LTKD, at_root.v_LTKD, at_root.out_TC[-1:]
    scores = [head.logits(out_1C)[0]]
    for d, token in enumerate(path):
        new: list[tuple[Tensor, Tensor]] = []

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            new.append((k_TKD, v_TKD))  # noqa: B023
            k_SKD, v_SKD = (torch.cat(x) for x in ((k_LTKD[layer], k_TKD), (v_LTKD[layer], v_TKD)))  # noqa: B023
            return _attention(q_THD, k_SKD, v_SKD)

        at_1 = torch.tensor([len(text) + d])
        out_1C = head(torch.tensor([token]), out_1C, at_1, attend)
        k_LTKD, v_LTKD = (
            torch.cat([old, torch.stack(more)], 1)
            for old, more in zip((k_LTKD, v_LTKD), zip(*new, strict=True), strict=True)
        )
        scores.append(head.logits(out_1C)[0])
    return scores
