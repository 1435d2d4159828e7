"""On a GPU: recorded rounds say what launched ones say, and no round waits for the host."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import fill_randomly, tiny_decoder
from test_engine_traffic import arriving_at_random
from tiny_engine import VOCAB, prompt_of, tokenizer

from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.drafters.base import View
from furcate.engine.build import build
from furcate.engine.engine import Engine
from furcate.engine.report import backend_json
from furcate.engine.round import Batch
from furcate.kernels.draft import Proposal
from furcate.models.decoder import Decoder
from furcate.models.weights import places
from furcate.verify.law import needs_of

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
BAD = VOCAB - 2  # a token that breaks whoever reads it
LAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
    {"temperature": 0.7, "repetition_penalty": 1.3, "logit_bias": {7: 2.0}},
)


def target() -> Decoder:
    spec = replace(tiny_decoder(vocab=VOCAB).spec, head_dim=16)
    decoder = Decoder(spec, torch.float32, torch.device("cpu"))
    fill_randomly(places(decoder), 0)
    return decoder.requires_grad_(False).to(GPU)


def engine(drafter: str, *, graphs: bool, decoder: Decoder | None = None) -> Engine:
    options = EngineOptions(max_batch=5, max_context=256, kv_tokens=4096, graphs=graphs)
    draft = DraftOptions() if drafter == "off" else DraftOptions(adaptive=False, topk=4, depth=4)
    return Engine(build(decoder or target(), tokenizer(), drafter, options, draft))


def asks(count: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    return [
        (
            prompt_of(rng.randint(1, 90), n % 5),
            SamplingParams(max_tokens=rng.randint(1, 40), seed=rng.getrandbits(64), **LAWS[n % 4]),
        )
        for n in range(count)
    ]


@pytest.mark.parametrize("drafter", ["off", "ngram"])
def test_recorded_rounds_say_what_launched_ones_say(drafter: str) -> None:
    asked = asks(24, 1)
    with engine(drafter, graphs=False) as launched:
        told = arriving_at_random(launched, asked, seed=2)
    with engine(drafter, graphs=True) as replayed:
        heard = arriving_at_random(replayed, asked, seed=2)
        played = replayed.built.player.played
    assert played.refused == {} and played.eager == 0 and played.replayed > 24
    assert heard == told


@pytest.mark.parametrize("law", LAWS[:2], ids=str)
def test_a_round_never_waits_for_the_device(law: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=50, seed=1, ignore_eos=True, **law)
    with engine("ngram", graphs=False) as one, torch.inference_mode():
        one.submit(prompt_of(40, 1), params)
        for _ in range(4):
            one.step()
        batch = Batch(
            slot_B=torch.zeros(1, dtype=torch.int64),
            allowance_B=torch.full((1,), 8),
            rows=8,
            columns=128,
            needs=needs_of([params], VOCAB),
            levels=max(one.built.round.drafter.depths, default=0),
        ).on(GPU)
        undrafted = replace(batch, levels=0)
        one.built.round.play(batch)
        one.built.round.play(undrafted)
        torch.cuda.set_sync_debug_mode("error")
        try:
            one.built.round.play(batch)
            one.built.round.play(undrafted)
            with pytest.raises(RuntimeError):
                batch.slot_B.item()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("drafter", ["off", "ngram"])
def test_while_rounds_run_ahead_the_host_waits_for_nothing_but_their_ends(drafter: str) -> None:
    params = SamplingParams(max_tokens=120, seed=1, temperature=0, ignore_eos=True)
    with engine(drafter, graphs=True) as one, engine(drafter, graphs=False) as plain:
        names = [one.submit(prompt_of(10 + n, n), params) for n in range(3)]
        while len(one._open[names[-1]][0].output) < 40:  # all kinds of rounds are recorded
            one.step()
        torch.cuda.set_sync_debug_mode("error")  # an event that is waited for is none
        try:
            for _ in range(10):
                one.step()
                assert len(one._loop.flights) == 1
        finally:
            torch.cuda.set_sync_debug_mode("default")
        told = [one.collect(name).token_ids for name in names]
        asked = [plain.submit(prompt_of(10 + n, n), params) for n in range(3)]
        assert told == [plain.collect(name).token_ids for name in asked]


def test_a_round_in_flight_hides_the_hosts_work() -> None:
    """The device works on while the host sleeps; a player that waits has both times in a row."""
    params = SamplingParams(max_tokens=200, seed=1, temperature=0, ignore_eos=True)
    seen: dict[int, bool] = {}
    for ahead in (0, 1):
        with engine("off", graphs=True) as one:
            one.built.player.ahead = ahead
            one.submit(prompt_of(10), params)
            for _ in range(20):
                one.step()
            time.sleep(0.2)
            before = int(one.built.round.state.length_C.max())
            cached = max(request.cached for request in one.built.scheduler.running)
            seen[ahead] = before > cached
    assert seen == {0: False, 1: True}


def test_a_capture_that_fails_is_said_and_launched_and_others_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A drafter that looks at the device's numbers while rounds of one request are recorded."""
    params = SamplingParams(max_tokens=20, seed=1, temperature=0, ignore_eos=True)
    asked = [(prompt_of(10 + 7 * n, n), params) for n in range(4)]
    with engine("off", graphs=False) as plain:
        want = [plain.collect(plain.submit(*ask)).token_ids for ask in asked]
    stream = torch.cuda.current_stream()
    with engine("ngram", graphs=True) as one:
        drafter, played = one.built.round.drafter, one.built.player.played
        propose = drafter.propose

        def waiting(view: View, levels: int) -> Proposal:
            found = propose(view, levels)
            if len(found.tokens_BP) == 1:
                found.tokens_BP.sum().item()
            return found

        monkeypatch.setattr(drafter, "propose", waiting)
        assert one.collect(one.submit(*asked[0])).token_ids == want[0]
        assert torch.cuda.current_stream() == stream
        refused = backend_json(one.built)["graphs"]["refused"]
        assert refused and all(name.startswith("1x") for name in refused)
        assert played.recorded == [] and played.replayed == 0 < played.eager
        names = [one.submit(*ask) for ask in asked]
        assert [one.collect(name).token_ids for name in names] == want
        assert any(name.startswith("4x") for name in played.recorded) and played.replayed > 0
        assert all(name.startswith("1x") for name in played.refused)
        assert torch.cuda.current_stream() == stream


@pytest.mark.parametrize("drafter", ["off", "ngram"])
def test_logits_that_are_no_numbers_end_one_request_of_a_recorded_round(drafter: str) -> None:
    """The broken one says BAD in its first round, and whoever reads that says nothing more."""
    law = {"max_tokens": 30, "seed": 3, "ignore_eos": True}
    fine = SamplingParams(**law, logit_bias={BAD: -100.0})
    good = [prompt_of(n, n) for n in (5, 20, 33)]
    decoder = target()
    with engine(drafter, graphs=True, decoder=decoder) as one:
        names = [one.submit(prompt, fine) for prompt in good]
        want = [one.collect(name).token_ids for name in names]
    decoder.embedding[BAD] = torch.nan
    with engine(drafter, graphs=True, decoder=decoder) as one:
        names = [one.submit(prompt, fine) for prompt in good]
        broken = one.submit(prompt_of(9), SamplingParams(**law, allowed_token_ids=(BAD,)))
        heard = [one.collect(name).token_ids for name in names]
        output = one.collect(broken)
        played = one.built.player.played
    assert output.finish_reason == "error" and output.token_ids == (BAD,)
    assert "not finite" in str(output.choices[0].error)
    assert heard == want
    assert played.eager == 0 and played.refused == {}
