"""What goes wrong stays with the request it went wrong in, and bad asks are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import tiny_decoder
from tiny_engine import VOCAB, finished, free_pages, ids, judged, prompt_of, tiny_engine, tokenizer
from tiny_heads import KINDS, around, network

from furcate.config import DraftOptions, EngineOptions, SamplingParams
from furcate.drafters.adversary import Adversary
from furcate.drafters.base import Drafter
from furcate.engine.engine import Engine
from furcate.engine.outputs import Output
from furcate.errors import BadFile, BadRequest
from furcate.models.decoder import Decoder, States

BAD = VOCAB - 2  # the token whose logits, or whose keys as well, are not numbers


def params(**more: Any) -> SamplingParams:
    asked = {"max_tokens": 20, "seed": 3, "ignore_eos": True, "logit_bias": {BAD: -100.0}}
    return SamplingParams(**{**asked, **more})


def broken_decoder() -> Decoder:
    """Reading BAD makes everything NaN: its own keys, and whatever sees them."""
    decoder = tiny_decoder(torch.float64, 0, VOCAB)
    with torch.no_grad():
        decoder.embedding[BAD] = torch.nan
    return decoder


class BrokenHead(Decoder):
    """Only logits right after BAD are NaN; keys stay finite."""

    def states(self, tokens_T: torch.Tensor, *rest: Any) -> States:
        states = super().states(tokens_T, *rest)
        broken_TC = states.last_TC.masked_fill((tokens_T == BAD)[:, None], torch.nan)
        return replace(states, last_TC=broken_TC)


def broken_head() -> Decoder:
    whole = tiny_decoder(torch.float64, 0, VOCAB)
    decoder = BrokenHead(whole.spec, whole.dtype, whole.device)
    decoder.load_state_dict(whole.state_dict())
    return decoder.requires_grad_(False)


def run(engine: Engine, prompts: Sequence[list[int]], p: SamplingParams) -> list[Output]:
    return finished(engine, [engine.submit(prompt, p) for prompt in prompts])


@pytest.mark.parametrize("make", [broken_decoder, broken_head])
@pytest.mark.parametrize("drafter", ["off", "ngram", "any", "eagle3", "medusa"])
@pytest.mark.parametrize("where", ["first", "last"])
def test_nan_logits_end_one_request_and_no_other(make: Any, drafter: str, where: str) -> None:
    good = [prompt_of(n, seed=n) for n in (5, 20, 33)]
    bad = [BAD, *prompt_of(20)] if where == "first" else [*prompt_of(20), BAD]
    streams = [[*prompt, *judged(prompt, params())] for prompt in good]
    guess: str | Drafter = drafter
    if drafter == "any":
        guess = Adversary(streams, "chain", vocab=VOCAB - 2)
    elif drafter in KINDS:
        guess = around(network(drafter), max_batch=4)
    with tiny_engine(guess, target=make(), max_batch=4, prefill_chunk=8) as engine:
        before = engine.built.scheduler.book.pool.free
        one, broken, two, three = run(engine, [good[0], bad, good[1], good[2]], params())
        later = run(engine, good, params(seed=4))
        assert free_pages(engine) == before
    for output, prompt in zip((one, two, three), good, strict=True):
        assert list(output.token_ids) == judged(prompt, params())
    for output, prompt in zip(later, good, strict=True):
        assert list(output.token_ids) == judged(prompt, params(seed=4))
    if make is broken_decoder or where == "last":
        assert broken.finish_reason == "error"
        assert broken.token_ids == ()
        assert "not finite" in str(broken.choices[0].error)
    else:
        assert broken.finish_reason == "length", "only the row right after it was broken"


def test_pages_of_a_broken_request_do_not_poison_their_next_owner() -> None:
    good = prompt_of(70)
    stream = [*good, *judged(good, params())]
    guess = Adversary([stream], "any", vocab=VOCAB - 2)
    with tiny_engine(guess, target=broken_decoder(), kv_tokens=128, max_batch=1) as engine:
        for bad in ([BAD, *prompt_of(100)], [*prompt_of(90, seed=2), BAD]):
            (broken,) = run(engine, [bad], params())
            assert broken.finish_reason == "error"
            # as in a fresh pool: a lone request whose pages follow one another reads them in place
            engine.built.scheduler.book.prefixes.clear()
            engine.built.scheduler.book.pool._free.sort(reverse=True)
            (output,) = run(engine, [good], params())
            assert list(output.token_ids) == stream[70:]


def test_what_was_said_before_the_error_stays_valid() -> None:
    prompt = prompt_of(9)
    with tiny_engine("off", target=broken_head()) as engine:
        forced = params(allowed_token_ids=(BAD,), logit_bias={}, logprobs=True)
        output = engine.collect(engine.submit(prompt, forced))
    assert output.finish_reason == "error"
    assert output.token_ids == (BAD,)
    assert output.logprobs is not None
    assert len(output.logprobs) == 1


def test_a_broken_request_leaves_nothing_for_later_prompts() -> None:
    with tiny_engine("off", target=broken_decoder()) as engine:
        run(engine, [[*prompt_of(40), BAD]], params())
        assert engine.built.scheduler.book.prefixes.held == 0


def refused(engine: Engine, prompt: Sequence[int], **asked: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        engine.submit(prompt, SamplingParams(**asked))
    assert not engine.built.scheduler.busy, "nothing was queued"
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "asked", "field"),
    [
        ([], {}, "prompt"),
        ([5] * 64, {}, "prompt"),
        ([5] * 65, {}, "prompt"),
        ([5, VOCAB], {}, "prompt"),
        ([5, -1], {}, "prompt"),
        ([5, True], {}, "prompt"),
        ([5, 1.0], {}, "prompt"),
        ([5, "6"], {}, "prompt"),
        ("text", {}, "prompt"),
        (None, {}, "prompt"),
        (torch.tensor([5, 6]), {}, "prompt"),
        ([5], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([5], {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ([5], {"allowed_token_ids": (3, VOCAB)}, "allowed_token_ids"),
        ([5], {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ([5], {"stop_token_ids": (-1,)}, "stop_token_ids"),
        ([5], {"stop_token_ids": tuple(range(65))}, "stop_token_ids"),
        ([5], {"stop_token_ids": tuple(range(3, 67))}, "stop_token_ids"),
    ],
)
def test_what_the_engine_cannot_honour_is_refused_by_name(
    prompt: list[int], asked: dict[str, Any], field: str
) -> None:
    with tiny_engine("off", max_context=64) as engine:
        assert refused(engine, prompt, **asked).field == field


def test_the_most_that_fits_is_taken() -> None:
    with tiny_engine("off", max_context=64) as engine:
        stops = tuple(range(2, 66))
        many = SamplingParams(stop_token_ids=stops, max_tokens=3, seed=1)
        assert engine.collect(engine.submit([5] * 63, many)).finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"n": 0},
        {"seed": -1},
        {"seed": 2**64},
        {"stop": ""},
        {"stop": ["a", ""]},
        {"logprobs": True, "top_logprobs": 21},
        {"logit_bias": {3: 101.0}},
        {"logit_bias": {3: float("nan")}},
        {"logprobs_mode": "cooked"},
        {"best_of": 2},
        {"n": True},
        {"n": 2.0},
        {"max_tokens": "5"},
        {"temperature": "1"},
        {"temperature": True},
        {"ignore_eos": 1},
        {"ignore_eos": "no"},
        {"stop": [3]},
        {"stop_token_ids": [True]},
        {"allowed_token_ids": [1.0]},
        {"logit_bias": {True: 1.0}},
        {"logit_bias": {"x": 1.0}},
    ],
    ids=str,
)
def test_options_out_of_range_are_refused_by_name(asked: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**asked)
    assert caught.value.field is not None
    assert caught.value.field.split(".")[0] in asked


@pytest.mark.parametrize(
    "asked",
    [
        {"min_tokens": 5, "max_tokens": 4},
        {"top_logprobs": 2},
        {"allowed_token_ids": ()},
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**asked)
    assert any(name in str(caught.value) for name in asked)


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        (EngineOptions, {"page_size": 15}),
        (EngineOptions, {"kv_tokens": 63}),
        (EngineOptions, {"max_batch": 0}),
        (EngineOptions, {"prefill_chunk": 0}),
        (EngineOptions, {"max_context": 7}),
        (EngineOptions, {"dtype": "int8"}),
        (EngineOptions, {"pages": 3}),
        (DraftOptions, {"num_draft_tokens": -1}),
        (DraftOptions, {"num_draft_tokens": 257}),
        (DraftOptions, {"depth": 0}),
        (DraftOptions, {"topk": 65}),
        (DraftOptions, {"prompt_lookup_max": 17}),
        (DraftOptions, {"prompt_lookup_min": 5}),
        (DraftOptions, {"width": 5}),
    ],
    ids=str,
)
def test_engine_and_draft_options_are_refused_by_name(kind: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        kind(**asked)
    assert next(iter(asked)) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_context": 5000}, "max_context"),
        ({"max_context": 128, "kv_tokens": 64}, "max_context"),
    ],
)
def test_an_engine_that_could_not_keep_its_word_is_not_built(
    options: dict[str, int], field: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        tiny_engine("off", **options)
    assert caught.value.field == field


def test_prompts_that_say_nothing_are_refused() -> None:
    nothing: list[str | list[int]] = ["", []]
    with tiny_engine("off") as engine:
        for prompt in nothing:
            with pytest.raises(BadRequest):
                engine.stream(prompt).__next__()
        with pytest.raises(BadRequest):
            engine.generate("\ud800")
        with pytest.raises(BadRequest):
            engine.generate([{"role": "user"}])
        with pytest.raises(BadRequest):
            engine.collect("request-9")
        assert engine.generate("a", SamplingParams(max_tokens=2)).prompt_token_ids
        assert len(ids("a")) == 1


def test_one_bad_prompt_in_a_list_leaves_nobody_behind() -> None:
    with tiny_engine("off", max_context=128) as engine:
        with pytest.raises(BadRequest):
            engine.generate(["fine", "too long " * 50], SamplingParams(max_tokens=4))
        assert not engine.built.scheduler.busy, "the first of them is not left in the queue"


@pytest.mark.parametrize("prompt", [None, 5, [], (), b"bytes", ["a", 3], [None], {"role": "user"}])
def test_what_is_no_prompt_is_refused_by_name(prompt: Any) -> None:
    with tiny_engine("off") as engine, pytest.raises(BadRequest) as caught:
        engine.generate(prompt, SamplingParams(max_tokens=2))
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("given", [{}, {"n": 2}, 0, "greedy"])
def test_params_of_another_kind_are_refused(given: Any) -> None:
    with tiny_engine("off") as engine, pytest.raises(BadRequest) as caught:
        engine.submit([5], given)
    assert caught.value.field == "params"


def test_whole_numbers_pass_for_real_ones_and_json_keys_for_token_ids() -> None:
    asked = SamplingParams(temperature=1, logit_bias={"3": 2})  # type: ignore[dict-item]
    assert asked.logit_bias == {3: 2.0}
    assert SamplingParams.model_validate_json(asked.model_dump_json()) == asked


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"vocab_size": VOCAB + 1}, "tokenizer.vocab_size"),
        ({"eos_ids": (2, VOCAB)}, "eos_token_id"),
    ],
)
def test_a_token_without_a_row_in_the_matrix_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], field: str
) -> None:
    for name, value in changes.items():
        monkeypatch.setattr(tokenizer(), name, value)
    with pytest.raises(BadFile) as caught:
        tiny_engine("off")
    assert caught.value.field == field


def test_rows_beyond_the_tokenizers_are_padding() -> None:
    target = tiny_decoder(torch.float64, 0, VOCAB + 8)
    with tiny_engine("off", target=target) as engine:
        assert engine.generate("a", SamplingParams(max_tokens=2)).token_ids
