"""Engines around tiny targets in float64: a random decoder, or one that says a given script."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from small_models import tiny_decoder
from tiny_vocab import tokens, write_folder
from torch import Tensor

from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.drafters.adversary import Adversary
from furcate.drafters.around import around_model
from furcate.drafters.base import Drafter
from furcate.drafters.draft_cache import Room
from furcate.drafters.recurrent import RecurrentDrafter
from furcate.engine.build import DEFAULT_KV_TOKENS, build
from furcate.engine.engine import Engine
from furcate.engine.naive import naive
from furcate.engine.outputs import Output
from furcate.models.decoder import Attend, Decoder, States
from furcate.models.spec import DecoderSpec, RopeSpec
from furcate.text.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "EOS",
    "FILL",
    "VOCAB",
    "Script",
    "decoder",
    "finished",
    "free_pages",
    "ids",
    "judged",
    "prompt_of",
    "tiny_engine",
    "tokenizer",
    "twins",
]

VOCAB = len(tokens())
EOS = 2  # <|im_end|>
FILL = tokens().index("x")  # what a script says where it may not say what it wanted
DRAFT: dict[str, Any] = {"num_draft_tokens": 15, "depth": 4, "topk": 4, "adaptive": False}


@cache
def tokenizer() -> Tokenizer:
    """The byte-level tokenizer of `tiny_vocab`, with a chat template."""
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(write_folder(Path(folder)))


@cache
@torch.inference_mode(False)  # tests of training get the same one
def decoder(seed: int = 0) -> Decoder:
    """A random decoder in float64 over the tiny vocabulary."""
    return tiny_decoder(torch.float64, seed, VOCAB)


class Script:
    """A target whose next token depends on its position alone: after `stream[:p]`, `stream[p]`.

    Past the end, and where that token is barred, it says FILL. Each token has a logit of its own,
    so logprobs differ by position.
    """

    dtype = torch.float64
    device = torch.device("cpu")
    spec = DecoderSpec(
        vocab_size=VOCAB,
        hidden_size=1,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        rms_norm_eps=1e-5,
        max_position=512,
        rope=RopeSpec(theta=10000.0),
        rope_layers=(True,),
    )

    def __init__(self, stream: Sequence[int]) -> None:
        self.say(stream)

    def say(self, stream: Sequence[int]) -> None:
        """Another stream from now on."""
        room = self.spec.max_position + 64
        self.next = torch.tensor((list(stream[1:]) + [FILL] * room)[:room])

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        row_TKD = torch.ones(len(tokens_T), 1, 2, dtype=self.dtype) * tokens_T[:, None, None]
        attend(0, row_TKD, row_TKD, row_TKD)
        return positions_T[:, None].to(self.dtype)

    def states(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, layers: tuple[int, ...]
    ) -> States:
        """There is one state, whichever is asked for."""
        last_TC = self(tokens_T, positions_T, attend)
        return States(last_TC, last_TC.expand(-1, len(layers)))

    def logits(self, hidden_TC: Tensor) -> Tensor:
        at_T1 = hidden_TC.long()
        logits_TV = torch.zeros(len(at_T1), VOCAB, dtype=self.dtype)
        logits_TV[:, FILL] = 3
        return logits_TV.scatter(1, self.next[at_T1], 9 + at_T1.double() / 7)


def tiny_engine(
    drafter: str | Drafter = "ngram",
    *,
    target: Any = None,
    draft: dict[str, Any] | None = None,
    **options: Any,
) -> Engine:
    """An engine that drafts in every round whatever that costs; `draft` changes those options."""
    asked, how = EngineOptions(**options), DraftOptions(**_fitting(drafter, draft))
    guess = _model_drafter(asked, how) if drafter == "model" else drafter
    return Engine(build(decoder() if target is None else target, tokenizer(), guess, asked, how))


def _model_drafter(asked: EngineOptions, how: DraftOptions) -> RecurrentDrafter:
    """The target as its own drafter, with keys of its own: often right."""
    pages = -(-(asked.kv_tokens or DEFAULT_KV_TOKENS) // asked.page_size)
    room = Room(asked.max_batch, pages, asked.page_size, VOCAB, torch.device("cpu"))
    return around_model(decoder(), how, room)


def _fitting(drafter: str | Drafter, draft: dict[str, Any] | None) -> dict[str, Any]:
    return draft or {} if drafter == "off" else {**DRAFT, **(draft or {})}


def twins(streams: Sequence[Sequence[int]]) -> Adversary:
    """A drafter that always has the next four tokens, among wrong ones: every round accepts 4."""
    return Adversary(streams, "twins", vocab=VOCAB)


def ids(text: str) -> list[int]:
    """Tokens of a text."""
    return tokenizer().encode(text)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt over few tokens, so that its suffixes recur."""
    rng = random.Random(seed)
    few = rng.sample(range(3, VOCAB - 3), 6)
    return rng.choices(few, k=length)


def judged(prompt: Sequence[int], params: SamplingParams, context: int = 4096) -> list[int]:
    """What the slow loop answers; stop strings excluded."""
    room = context - len(prompt)
    most = room if params.max_tokens is None else min(room, params.max_tokens)
    asked = params.model_copy(update={"max_tokens": most, "n": 1})
    return list(_judged(tuple(prompt), asked.model_dump_json()))


@cache
def _judged(prompt: tuple[int, ...], asked: str) -> tuple[int, ...]:
    params = SamplingParams.model_validate_json(asked)
    eos = () if params.ignore_eos else (EOS,)
    return tuple(naive(decoder(), prompt, params, (*eos, *params.stop_token_ids)))


def finished(engine: Engine, asked: Sequence[str]) -> list[Output]:
    """Run these requests to their end."""
    return [engine.collect(request_id) for request_id in asked]


def free_pages(engine: Engine) -> int:
    """Pages that nobody holds once nothing is kept for later prompts; nobody may be at work."""
    scheduler = engine.built.scheduler
    assert not scheduler.busy
    scheduler.book.prefixes.clear()
    return scheduler.book.pool.free
