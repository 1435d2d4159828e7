"""A text that the tiny target wrote itself, and recipes that train heads on it in seconds."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from small_models import tiny_decoder

from furcate.models.causal import causal_attend
from furcate.models.decoder import Decoder
from furcate.train.corpus import About, Corpus, Kind, Part
from furcate.train.recipe import Recipe
from furcate.train.shapes import Shape, plans
from furcate.train.writer import CorpusWriter

VOCAB, PROMPT = 64, 4
ABOUT = About("tiny", "f" * 64, VOCAB, {"kind": "self", "seed": 0})


@cache
@torch.inference_mode(False)  # some tests learn from it, others only run it
def target() -> Decoder:
    """The tiny float32 target."""
    return tiny_decoder()


def write_corpus(folder: Path, conversations: int = 60, seed: int = 0) -> Corpus:
    """Random prompts and the target's greedy answers, 20 to 60 tokens together."""
    rng = torch.Generator().manual_seed(seed)
    with CorpusWriter(folder, ABOUT) as writer:
        for number in range(conversations):
            length = int(torch.randint(20, 60, (), generator=rng))
            prompt = torch.randint(VOCAB, (PROMPT,), generator=rng).tolist()
            writer.add(number, _answered(prompt, length), [Part(PROMPT, length, Kind.ANSWER)])
        writer.finish()
    return Corpus.open(folder)


def recipe(*kinds: str, **changes: Any) -> Recipe:
    """A recipe of a few quick steps."""
    shape = Shape(steps=3, draft_vocab=48)
    settings: dict[str, Any] = {
        "heads": plans(kinds or ("eagle3",), target().spec, shape),
        "tokens": 20 * 256,
        "batch_tokens": 256,
        "loss_vocab": 48,
        "loss_rows": 150,
        "rate": 5e-3,
        "warmup_steps": 5,
        "held_out": 6,
        "held_out_seconds": 1e9,
        "checkpoint_seconds": 1e9,
        "log_steps": 10,
    }
    return Recipe(**{**settings, **changes})


@torch.no_grad()
def _answered(ids: list[int], length: int) -> list[int]:
    while len(ids) < length:
        hidden_TC = target()(torch.tensor(ids), torch.arange(len(ids)), causal_attend)
        ids.append(int(target().logits(hidden_TC[-1:]).argmax()))
    return ids
