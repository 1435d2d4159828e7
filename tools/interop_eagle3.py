"""Loads exported EAGLE-3 heads with speculators' own loader and compares draft logits with ours.

Needs `speculators`, which furcate itself does not: see tests/interop/README.md for the recipe.

    python tools/interop_eagle3.py                            made-up heads, every flag
    python tools/interop_eagle3.py HEAD --target TARGET       a head of any format

Legend: T tokens, C hidden size, F features, H/K query and key heads, D head size or draft
vocabulary, V vocabulary.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators import SpeculatorModel
from torch import Tensor

from furcate.heads.eagle import Eagle3
from furcate.heads.exchange import Target, export_head, read_head
from furcate.heads.formats.configs import block_to_hf
from furcate.heads.formats.detect import format_named
from furcate.heads.spec import EagleSpec
from furcate.heads.store import new_head, save_head
from furcate.models.decoder import Decoder
from furcate.models.load import load_decoder
from furcate.models.spec import DecoderSpec, RopeSpec
from furcate.models.weights import places
from furcate.models.zoo import resolve

TOLERANCE = 1e-3  # of logits in float32, as the project promises
TOKENS = 128  # one block of speculators' attention mask
STEPS = 3  # of drafting on the head's own states
CPU = torch.device("cpu")
FLAGS = ("norm_before_residual", "norm_output")
FEATURE_NORMS: tuple[dict[str, bool], ...] = ({}, {"norm_before_fc": True}, {"fc_norm": True})


@dataclass(frozen=True, slots=True)
class Case:
    """A head to send over, and what to call it."""

    name: str
    directory: Path
    target: Decoder


@dataclass(frozen=True, slots=True)
class Inputs:
    """A made-up text and the target's features along it."""

    tokens_T: Tensor  # tokens at positions 1..T
    features_TF: Tensor  # features at positions 0..T-1


def main() -> int:
    """Compare, print the largest differences, and return 1 where one is too large."""
    asked = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    asked.add_argument("head", nargs="?", type=Path)
    asked.add_argument("--target", default="smollm2-135m")
    flags = asked.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        cases = given(flags.head, flags.target) if flags.head else made_up(place)
        for case in cases:
            difference = compared(case, place)
            worst = max(worst, difference)
            print(f"{case.name}: {difference:.1e}")
        broken = compared(case, place, flipped="norm_before_residual")
    print(f"largest difference of a draft logit: {worst:.1e} (allowed: {TOLERANCE:.0e})")
    print(f"with one flag turned over in what they read: {broken:.1e} (must be seen)")
    return int(not worst <= TOLERANCE < broken)


def given(head: Path, target: str) -> Iterator[Case]:
    """One head of the user's."""
    yield Case(head.name, head, load_decoder(resolve(target), torch.float32, CPU))


def made_up(place: Path) -> Iterator[Case]:
    """Random heads of a random target: flags, norms of features, layers, Qwen's norms."""
    target = random_target()
    rng = torch.Generator().manual_seed(7)
    order = torch.randperm(target.spec.vocab_size, generator=rng)
    for flags in itertools.product((False, True), repeat=len(FLAGS)):
        for norms, layers, qk_norm in itertools.product(FEATURE_NORMS, (1, 2), (False, True)):
            told = dict(zip(FLAGS, flags, strict=True)) | norms
            on = [name for name, value in told.items() if value]
            name = ", ".join([*on, f"{layers} layers", "qwen3" if qk_norm else "llama"])
            block = replace(
                target.spec, num_layers=layers, rope_layers=(True,) * layers, qk_norm=qk_norm
            )
            size = block.hidden_size
            spec = EagleSpec("eagle3", block, size, (2, 4, 5), 50, **told)  # type: ignore[arg-type]
            head = new_head(spec, target, order[:50].sort().values)
            randomise(dict(head.named_parameters()))
            path = place / f"head-{len(list(place.iterdir()))}"
            save_head(path, head, frequent_N=order, provenance={"made": "up"})
            yield Case(name, path, target)


def compared(case: Case, place: Path, flipped: str | None = None) -> float:
    """The largest difference of a draft logit over all positions and steps.

    With `flipped` they read a config in which that flag is turned over.
    """
    verifier = as_hf(case.target, place / f"verifier-{len(list(place.iterdir()))}")
    out = place / f"out-{len(list(place.iterdir()))}"
    spec = case.target.spec
    told = Target(spec, lambda _: case.target, None, str(verifier))
    export_head(case.directory, out, format_named("speculators"), told)
    ours = read_head(out, case.target)
    assert isinstance(ours, Eagle3)
    if flipped is not None:
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(config | {flipped: not config[flipped]}))
    theirs = SpeculatorModel.from_pretrained(str(out), dtype=torch.float32).eval()
    rng = torch.Generator().manual_seed(11)
    features_TF = torch.randn(TOKENS, len(ours.layers) * spec.hidden_size, generator=rng)
    inputs = Inputs(torch.randint(spec.vocab_size, (TOKENS,), generator=rng), features_TF)
    pairs = zip(logits_of_ours(ours, inputs), logits_of_theirs(theirs, inputs), strict=True)
    return max(
        float((mine[: TOKENS - step] - other[: TOKENS - step]).abs().max())
        for step, (mine, other) in enumerate(pairs)
    )


@torch.inference_mode()
def logits_of_theirs(model: Any, inputs: Inputs) -> list[Tensor]:
    """What their output matrix gives at each step of their own forward pass."""
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _m, _i, out: seen.append(out[0]))
    model(
        hidden_states=inputs.features_TF[None],
        input_ids=inputs.tokens_T[None],
        document_ids=torch.zeros(1, TOKENS, dtype=torch.int64),
        ttt_steps=STEPS,
    )
    hook.remove()
    return seen


@torch.inference_mode()
def logits_of_ours(head: Eagle3, inputs: Inputs) -> list[Tensor]:
    """The same from our network: step s drafts from every position at once, s tokens ahead.

    A row sees the rows of step 0 up to its own column, and its own column in later steps.
    """
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(head.kv.layers)]
    causal_TT = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    own_TT = torch.eye(TOKENS, dtype=torch.bool)

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        kept[layer].append((k_TKD, v_TKD))
        k, v = (torch.cat(each) for each in zip(*kept[layer], strict=True))
        seen = torch.cat((causal_TT, *[own_TT] * (len(kept[layer]) - 1)), 1)
        out_HTD = torch.nn.functional.scaled_dot_product_attention(
            q_THD.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), seen, enable_gqa=True
        )
        return out_HTD.transpose(0, 1)

    state_TC = head.fuse(inputs.features_TF)
    logits = []
    for step in range(STEPS):
        tokens_T = inputs.tokens_T.roll(-step)
        tokens_T[TOKENS - step :] = 0
        positions_T = torch.arange(1, TOKENS + 1) + step
        state_TC = head(tokens_T, state_TC, positions_T, attend)
        logits.append(head.logits(state_TC))
    return logits


def random_target() -> Decoder:
    """A small target with laws that are far from flat."""
    spec = DecoderSpec(
        vocab_size=90,
        hidden_size=64,
        intermediate_size=96,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position=256,
        rope=RopeSpec(10000.0),
        rope_layers=(True,) * 8,
    )
    made = Decoder(spec, torch.float32, CPU).requires_grad_(False)
    randomise(dict(made.named_parameters()))
    return made


def randomise(tensors: dict[str, Tensor]) -> None:
    """Norms near one, matrices that keep the size of what they read."""
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in sorted(tensors.items()):
            noise = torch.randn(tensor.shape, generator=rng)
            tensor.copy_(1 + 0.2 * noise if "norm" in name else noise / tensor.shape[-1] ** 0.5)


def as_hf(target: Decoder, folder: Path) -> Path:
    """The target as a folder that speculators can take for its verifier."""
    folder.mkdir()
    config = block_to_hf(target.spec, torch.float32) | {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": target.spec.tied_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: view.contiguous() for name, view in places(target).items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


if __name__ == "__main__":
    sys.exit(main())
