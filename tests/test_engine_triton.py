"""An engine on the Triton kernels says what one on the torch references says, in float32.

Without a GPU the kernels run in the interpreter. The two round differently, so the streams are
compared on targets whose choices are far apart.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_graphs import FakeRecorder, recorded
from small_models import fill_randomly, tiny_decoder
from tiny_engine import DRAFT, VOCAB, finished, prompt_of, tokenizer
from triton_device import DEVICE, MARKS

from furcate.cli.options import TargetFlags
from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.drafters.around import around_head, beside_matches
from furcate.drafters.draft_cache import Room
from furcate.drafters.ngram import NgramDrafter
from furcate.engine import build as building
from furcate.engine.build import build
from furcate.engine.compare import parting
from furcate.engine.engine import Engine
from furcate.engine.report import backend_json
from furcate.errors import Unsupported
from furcate.heads.eagle import Eagle3
from furcate.heads.output import Shared
from furcate.heads.spec import EagleSpec
from furcate.kernels import backend_triton, draft_head_triton, sample_triton
from furcate.kernels.backend import TORCH, Kernels
from furcate.kernels.backend_triton import TRITON
from furcate.models import blocks_triton
from furcate.models.decoder import Decoder
from furcate.models.weights import places

pytestmark = MARKS

MOST = 4 if DEVICE.type == "cpu" else 60
OPTIONS: dict[str, Any] = {"max_batch": 3, "max_context": 96, "kv_tokens": 512}
LAWS = (
    {"temperature": 0.0, "seed": 1},
    {"temperature": 0.9, "seed": 2},
    {"temperature": 0.8, "seed": 3, "top_p": 0.9},  # the spelled-out law, on the same kernels
)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":  # the interpreter sorts a thousand keys in half a second
        monkeypatch.setattr(draft_head_triton, "_BLOCKS", 16)
        monkeypatch.setattr(sample_triton, "_BLOCKS", 64)


def target(dtype: torch.dtype = torch.float32, head_dim: int = 16) -> Decoder:
    spec = replace(tiny_decoder(vocab=VOCAB).spec, head_dim=head_dim)
    decoder = Decoder(spec, dtype, torch.device("cpu"))
    fill_randomly(places(decoder), 0)
    return decoder.requires_grad_(False).to(DEVICE)


def head(decoder: Decoder, small_vocab: bool) -> Eagle3:
    token_D = torch.arange(3, VOCAB, 2, device=DEVICE) if small_vocab else None
    words = VOCAB if token_D is None else len(token_D)
    block = replace(decoder.spec, num_layers=1, rope_layers=(True,), intermediate_size=40)
    spec = EagleSpec("eagle3", block, block.hidden_size, (0, 1, 2), words, fc_norm=True)
    made = Eagle3(spec, Shared.of(decoder), token_D)
    with torch.no_grad():
        for name, x in made.named_parameters():
            x.copy_(filled(name, x))
    return made.requires_grad_(False)


def filled(name: str, like: torch.Tensor) -> torch.Tensor:
    made = {name: torch.empty(like.shape)}
    fill_randomly(made, 5)
    return made[name]


def engine_on(kernels: Kernels, decoder: Decoder, drafter: str, patch: Any) -> Engine:
    """An engine on these kernels, whatever the device."""
    patch.setattr(building, "kernels_of", lambda device, **_: kernels)
    wide = {"depth": 3, "topk": 1} if drafter.endswith("chain") else {"depth": 2, "topk": 3}
    how = DraftOptions(**{**DRAFT, **wide, "num_draft_tokens": 7})
    guess: Any = drafter
    if drafter.startswith("eagle3"):
        room = Room(3, 512 // 16, 16, VOCAB, DEVICE, kernels)
        guess = around_head(head(decoder, drafter == "eagle3 of some"), how, room)
    elif drafter == "hybrid":
        room = Room(3, 512 // 16, 16, VOCAB, DEVICE, kernels)
        ngram = NgramDrafter(DraftOptions(), capacity=3, device=DEVICE, kernels=kernels)
        guess = around_head(head(decoder, False), how, room, longest=ngram.depth)
        guess = beside_matches(ngram, guess, room)
    elif drafter == "off":
        how = DraftOptions()
    built = build(decoder, tokenizer(), guess, EngineOptions(**OPTIONS), how)
    return Engine(built)


def answers(engine: Engine) -> list[Any]:
    names = []
    for n, law in enumerate(LAWS):
        params = SamplingParams(max_tokens=MOST, ignore_eos=True, **law)
        names.append(engine.submit(prompt_of(4 + 9 * n, n), params))
    return finished(engine, names)


@pytest.mark.parametrize(
    "drafter", ["off", "ngram", "eagle3", "eagle3 of some", "eagle3, a chain", "hybrid"]
)
def test_triton_says_what_torch_says(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = target()
    with engine_on(TORCH, decoder, drafter, monkeypatch) as engine:
        told = answers(engine)
    with engine_on(TRITON, decoder, drafter, monkeypatch) as engine:
        heard = answers(engine)
        report = backend_json(engine.built)
        for one, other, law in zip(heard, told, LAWS, strict=True):
            params = SamplingParams(max_tokens=MOST, ignore_eos=True, **law)
            part = parting(engine, one, other, params)
            assert part is None or part.tie, f"{law}: {part}"
    assert report["kernels"] == "triton" and report["kernels_why"] is None
    assert DEVICE.type == "cpu" or report["graphs"]["refused"] == {}
    if drafter.startswith("eagle3") or drafter == "hybrid":
        assert report["draft_kernels"] == "triton"
        drafted = [sum(o.stats.drafted for o in side) for side in (heard, told)]
        assert drafted[0] == drafted[1] > 0
        for one, other in zip(heard, told, strict=True):
            assert one.stats.accepted == other.stats.accepted, "the same nodes were proposed"


def told_by(decoder: Decoder, drafter: str, laws: Sequence[dict[str, Any]]) -> list[Any]:
    """Tokens and logprobs of a batch-invariant engine that answers all of these at once."""
    how = DraftOptions()
    if drafter == "ngram":  # in every round, whatever that costs on a busy machine
        how = DraftOptions(topk=1, num_draft_tokens=5, adaptive=False)
    options = EngineOptions(**OPTIONS, batch_invariant=True)
    with Engine(build(decoder, tokenizer(), drafter, options, how)) as engine:
        assert engine.built.round.kernels.batch_invariant
        names = []
        for law in laws:
            params = SamplingParams(max_tokens=MOST, ignore_eos=True, logprobs=True, **law)
            names.append(engine.submit(2 * prompt_of(2 + law["seed"], law["seed"]), params))
        outputs = finished(engine, names)
        drafted = sum(output.stats.drafted for output in outputs)
    assert (drafted > 0) == (drafter == "ngram")
    return [(output.token_ids, output.logprobs) for output in outputs]


def test_a_batch_invariant_engine_gives_the_same_bits_alone_and_with_chains_beside_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []

    def invariant(found: Any) -> Any:
        def noted(*_: Any, batch_invariant: bool) -> Any:
            asked.append(batch_invariant)
            return found

        return noted

    monkeypatch.setattr(building, "kernels_of", invariant(backend_triton.INVARIANT))
    monkeypatch.setattr(building, "blocks_of", invariant(blocks_triton.INVARIANT))
    decoder, (greedy, sampled) = target(), LAWS[:2]
    alone = told_by(decoder, "off", [sampled])
    assert told_by(decoder, "ngram", [greedy, sampled])[1:] == alone
    assert asked == [True] * 4


def test_a_cpu_refuses_to_promise_it() -> None:
    options = TargetFlags(device="cpu", batch_invariant=True).engine_options()
    with pytest.raises(Unsupported, match="number of rows") as caught:
        build(tiny_decoder(vocab=VOCAB), tokenizer(), "off", options, DraftOptions())
    assert caught.value.field == "batch_invariant"


@pytest.mark.parametrize(
    ("dtype", "head_dim", "why"),
    [
        (torch.float64, 16, "the Triton kernels are not for float64"),
        (torch.float32, 8, "the Triton kernels want a power of two .* and this is 8"),
        (torch.float32, 24, "the Triton kernels want a power of two .* and this is 24"),
    ],
)
def test_what_the_kernels_do_not_know_falls_back_by_name(
    dtype: torch.dtype, head_dim: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_on(TRITON, target(dtype, head_dim), "off", monkeypatch) as engine:
        report = backend_json(engine.built)
        outputs = answers(engine)
    assert report["kernels"] == "torch"
    assert re.fullmatch(why, report["kernels_why"])
    assert all(len(output.token_ids) == MOST for output in outputs)


class _Small(FakeRecorder):
    """Of a device whose programs have too little shared memory."""

    def record(self, step: Any) -> Any:
        from triton.runtime.errors import OutOfResources  # not before the interpreter is on

        raise OutOfResources(230_400, 101_376, "shared memory")


def test_a_kernel_too_large_for_the_device_is_an_error_that_says_so() -> None:
    engine, _ = recorded("off", recorder=_Small())
    params, played = SamplingParams(max_tokens=4), engine.built.player.played
    with engine, pytest.raises(Unsupported, match=r"shared memory.* 230400, .* 101376") as caught:
        engine.collect(engine.submit(prompt_of(9), params))
    assert caught.value.field == "device" and "smaller dtype" in str(caught.value)
    assert played.refused == {}, "launching it would fail as well"
