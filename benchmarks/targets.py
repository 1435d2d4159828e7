"""Targets for the GPU scripts: known sizes, the embedded model, and decoders of random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from furcate.config import DraftOptions
from furcate.drafters.around import around_head
from furcate.drafters.base import Drafter
from furcate.drafters.make import Setting, make_drafter, room_of
from furcate.heads.eagle import Eagle3
from furcate.heads.output import Shared
from furcate.heads.spec import EagleSpec
from furcate.kernels.backend import kernels_of
from furcate.kv.cache import CacheShape
from furcate.models.decoder import Decoder
from furcate.models.load import load_decoder
from furcate.models.spec import DecoderSpec, RopeSpec
from furcate.models.zoo import resolve
from furcate.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["OWN", "PAGE", "SPECS", "Target", "drafts_of", "fill", "target_of"]

OWN = "smollm2-135m"
PAGE = 16
_LLAMA_8B = DecoderSpec(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    max_position=131072,
    rope=RopeSpec(theta=500000.0),
    rope_layers=(True,) * 32,
)
_SMOLLM2 = DecoderSpec(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position=8192,
    rope=RopeSpec(theta=100000.0),
    rope_layers=(True,) * 30,
    tied_embeddings=True,
)
_TINY = replace(
    _LLAMA_8B,
    vocab_size=49152,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_layers=(True,) * 2,
)
SPECS: Mapping[str, DecoderSpec] = {OWN: _SMOLLM2, "llama-8b": _LLAMA_8B, "tiny": _TINY}


@dataclass(frozen=True)
class Target:
    """A decoder, the tokenizer that an engine needs, and its heads."""

    name: str
    decoder: Decoder
    tokenizer: Tokenizer

    def drafter(self, kind: str, context: int, batch: int) -> Drafter:
        """By its way; a random EAGLE-3 head where the target has random weights."""
        spec, (kind, how) = self.decoder.spec, drafts_of(kind)
        pages = batch * -(-context // PAGE)
        shape = CacheShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, pages, PAGE)
        kernels = kernels_of(self.decoder.device)
        setting = Setting(self.decoder, self.tokenizer, shape, batch, how, kernels)
        if kind != "eagle3" or self.name == OWN:
            return make_drafter(kind, setting)
        return around_head(_random_head(self.decoder), how, room_of(setting))


def drafts_of(way: str) -> tuple[str, DraftOptions]:
    """A drafter's name, and how it drafts: "eagle3@5" has five levels."""
    name, _, depth = way.partition("@")
    return name, DraftOptions(depth=int(depth)) if depth else DraftOptions()


def target_of(name: str, device: torch.device) -> Target:
    """SmolLM2 with its own weights, any other with random ones.

    The last norm is zero: all scores are equal then, and the choice is token 0, whatever rounds
    how.
    """
    tokenizer = load_tokenizer(resolve(OWN))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if name == OWN:
        decoder = load_decoder(resolve(OWN), dtype, device)
    else:
        decoder = Decoder(SPECS[name], dtype, device)
        fill(decoder)
    decoder.requires_grad_(False).norm.weight.zero_()
    return Target(name, decoder, tokenizer)


def fill(module: torch.nn.Module) -> None:
    """Random weights that keep the stream's size."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "norm" in name:
                weight.fill_(1.0)
            else:
                weight.normal_(0, weight.shape[-1] ** -0.5)


def _random_head(target: Decoder) -> Eagle3:
    """One layer of the target's widths over 32,768 tokens, or all where there are fewer."""
    spec, device = target.spec, target.device
    words = min(32768, spec.vocab_size)
    block = replace(spec, num_layers=1, rope_layers=(True,))
    layers = (1, spec.num_layers // 2, spec.num_layers - 1)
    head = EagleSpec("eagle3", block, block.hidden_size, layers, words, own_output=True)
    made = Eagle3(head, Shared.of(target), torch.arange(words, device=device))
    fill(made)
    return made.requires_grad_(False)
