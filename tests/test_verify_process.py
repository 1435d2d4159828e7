"""The chain from logits to choices: one law for plain decoding and for every node of a tree."""

from __future__ import annotations

import random
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from verify_cases import (
    draft_of,
    filtered_law,
    law_of,
    path_of,
    random_draft,
    rows_of,
    stacked,
)

from furcate.config import SamplingParams
from furcate.kernels.draft import Draft
from furcate.verify import filters, penalties
from furcate.verify.coupled import verify
from furcate.verify.filters import floor_of, threshold
from furcate.verify.law import Law, Needs, Rows, needs_of, noise_of, plain_rows
from furcate.verify.logprobs import processed_logprobs, raw_logprobs
from furcate.verify.process import choose, process
from furcate.verify.stops import truncate

SOME = {
    "temperature_B": 0.8,
    "top_k_B": 20,
    "top_p_B": 0.9,
    "min_p_B": 0.02,
    "repetition_B": 1.3,
    "presence_B": 0.4,
    "frequency_B": -0.2,
    "min_tokens_B": 3,
}


def logits_of(
    draft: Draft, vocab: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*draft.tokens_BR.shape, vocab, generator=rng, dtype=dtype) * 3


def everything(batch: int, vocab: int, seed: int = 0) -> Law:
    """Every step of the chain on."""
    rng = torch.Generator().manual_seed(seed)
    return law_of(
        batch,
        vocab,
        **SOME,
        stop_BS=torch.tensor([[0, 3, -1]] * batch),
        bias_BV=torch.randn(batch, vocab, generator=rng),
        allowed_BV=torch.rand(batch, vocab, generator=rng) < 0.8,
        prompt_BV=torch.rand(batch, vocab, generator=rng) < 0.3,
        counts_BV=torch.randint(0, 3, (batch, vocab), generator=rng),
    )


def plain_row_of(law: Law, rows: Rows, row: int) -> tuple[Law, Rows]:
    """The law and the row that plain decoding has once row's path is committed."""
    path = path_of(rows.draft, row)
    tokens = rows.draft.tokens_BR[0, path]
    assert law.counts_BV is not None
    counts_BV = law.counts_BV + torch.bincount(tokens, minlength=law.counts_BV.shape[1])
    committed = replace(law, counts_BV=counts_BV, output_B=law.output_B + len(path))
    return committed, plain_rows(rows.draft.tokens_BR[:, row], rows.length_B + len(path))


def rows_that_differ_from_plain(law: Law, rows: Rows, logits_BRV: Tensor) -> int:
    """Live rows whose processed numbers have other bits than plain decoding's."""
    tree = process(logits_BRV, law, rows)
    allowed_BRV = torch.ones_like(tree.scores_BRV) if tree.allowed_BRV is None else tree.allowed_BRV
    allowed_BRV = allowed_BRV.expand_as(tree.scores_BRV)
    differ = 0
    for row in range(int(rows.draft.live_B)):
        plain = process(logits_BRV[:, row : row + 1], *plain_row_of(law, rows, row))
        same = torch.equal(plain.scores_BRV[:, 0], tree.scores_BRV[:, row])
        if plain.allowed_BRV is not None:
            same = same and torch.equal(plain.allowed_BRV[:, 0], allowed_BRV[:, row])
        differ += not same
    return differ


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans(), st.sampled_from([5, 64]))
def test_a_node_is_processed_as_plain_decoding_would_after_its_path(
    rng: random.Random, double: bool, vocab: int
) -> None:
    draft = random_draft(rng, 12, rng.randint(1, 12), depth=4, vocab=vocab)
    law = everything(1, vocab, rng.randrange(1000))
    logits = logits_of(
        draft, vocab, rng.randrange(1000), torch.float64 if double else torch.float32
    )
    assert rows_that_differ_from_plain(law, rows_of(draft), logits) == 0


def test_counting_only_the_last_accepted_token_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """sglang#33643: penalties see only the last accepted token."""

    def own_token_only(draft: Draft) -> Tensor:
        slot_R = torch.arange(draft.tokens_BR.shape[1])
        own_BRR = (slot_R == slot_R[:, None]) & (slot_R > 0)
        same_BRR = draft.tokens_BR[:, :, None] == draft.tokens_BR[:, None, :]
        return (own_BRR.float() @ same_BRR.float()).long()

    draft = draft_of([1, 2, 4, 2], [0, 0, 1, 2])
    law, logits = everything(1, 8), logits_of(draft, 8)
    assert rows_that_differ_from_plain(law, rows_of(draft), logits) == 0
    monkeypatch.setattr(penalties, "_on_path", own_token_only)
    assert rows_that_differ_from_plain(law, rows_of(draft), logits) > 0


def test_penalties_are_those_of_the_definition() -> None:
    draft = draft_of([1, 2, 2], [0, 0, 1])
    law = law_of(
        1,
        4,
        repetition_B=2.0,
        presence_B=0.5,
        frequency_B=0.25,
        prompt_BV=torch.tensor([[True, False, False, False]]),
        counts_BV=torch.tensor([[0, 1, 0, 0]]),
    )
    logits = torch.tensor([[1.0, 1.0, -1.0, 1.0]]).expand(1, 3, 4)
    got = process(logits, law, rows_of(draft)).logits_BRV[0]
    # token 0 is in the prompt alone, 1 was put out once, 2 occurs on the path 0, 1 and 2 times
    assert got[0].tolist() == [0.5, 0.5 - 0.75, -1.0, 1.0]
    assert got[1].tolist() == [0.5, 0.5 - 0.75, -2.0 - 0.75, 1.0]
    assert got[2].tolist() == [0.5, 0.5 - 0.75, -2.0 - 1.0, 1.0]


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_a_row_has_the_same_bits_whatever_stands_beside_it(rows: int) -> None:
    vocab = 40_000
    row = torch.randn(1, 1, vocab, generator=torch.Generator().manual_seed(3)) * 3
    law = replace(
        everything(1, vocab), min_tokens_B=None, needs=Needs(True, True, False, 300, True)
    )
    alone = process(row, law, rows_of(draft_of([1], [0])))
    star = rows_of(draft_of([1] * rows, [0] * rows))
    # a star of one token: the root's row is the row that stands alone
    among = process(row.expand(1, rows, vocab), law, replace(star, depth=1))
    assert torch.equal(alone.scores_BRV[0, 0], among.scores_BRV[0, 0])
    assert alone.allowed_BRV is not None
    assert among.allowed_BRV is not None
    assert torch.equal(alone.allowed_BRV[0, 0], among.allowed_BRV[0, 0])


def test_steps_run_for_one_request_leave_the_others_as_they_are() -> None:
    vocab, draft = 50, draft_of([1, 2, 3], [0, 0, 1])
    busy, quiet = everything(1, vocab), law_of(1, vocab, temperature_B=0.9, seed_B=4)
    greedy = law_of(1, vocab)
    merged: dict[str, Tensor] = {}
    for name in (f for f in Law.__slots__ if f != "needs"):
        parts = [getattr(law, name) for law in (busy, quiet, greedy)]
        parts = [off_like(parts[0], name, vocab) if part is None else part for part in parts]
        if name == "stop_BS":
            parts = [torch.cat([p, -torch.ones(1, 3 - p.shape[1]).long()], 1) for p in parts]
        merged[name] = torch.cat(parts)
    batch = Law(needs=busy.needs, **merged)
    logits = logits_of(stacked([draft] * 3), vocab)
    together = choose(process(logits, batch, rows_of(stacked([draft] * 3)))).token_BR
    for i, law in enumerate((busy, quiet, greedy)):
        alone = choose(process(logits[i : i + 1], law, rows_of(draft))).token_BR
        assert torch.equal(alone[0], together[i])


def off_like(given: Tensor, name: str, vocab: int) -> Tensor:
    return torch.ones(1, vocab, dtype=torch.bool) if name == "allowed_BV" else given * 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 2, 100, 999, 1000])
def test_a_threshold_by_radix_is_the_one_by_sorting(dtype: torch.dtype, k: int) -> None:
    rng = torch.Generator().manual_seed(k)
    values = (torch.randn(2, 3, 1000, generator=rng, dtype=dtype) * 3).round(decimals=1)
    values[0, 0] = -0.0
    values[0, 1, 100:] = -torch.inf
    values[1, 1] *= 1e30
    one = torch.ones_like(values, dtype=torch.int64)
    got = threshold(values, one, torch.full((2, 1, 1), k))
    assert torch.equal(got, values.sort(-1, descending=True).values[..., k - 1 : k])


def test_a_threshold_beyond_all_mass_keeps_everything() -> None:
    values = torch.arange(4.0)[None, None]
    assert threshold(values, torch.ones(1, 1, 4).long(), torch.tensor([[[5]]])) == -torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("top_k", [0, 1, 7, 150])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.93, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.07, 1.0])
def test_filters_keep_what_sorting_keeps(
    dtype: torch.dtype, top_k: int, top_p: float, min_p: float
) -> None:
    vocab, batch = 300, 4
    draft = stacked([draft_of([0], [0])] * batch)
    logits = logits_of(draft, vocab).mul(4).round().div(4).to(dtype)  # many ties
    law = law_of(batch, vocab, temperature_B=0.7, top_k_B=top_k, top_p_B=top_p, min_p_B=min_p)
    allowed_BRV = process(logits, law, rows_of(draft)).allowed_BRV
    for b in range(batch):
        want = filtered_law(logits[b, 0].tolist(), 0.7, top_k, top_p, min_p)
        kept = [True] * vocab if allowed_BRV is None else allowed_BRV[b, 0].tolist()
        assert kept == [p > 0 for p in want]


def test_ties_at_a_threshold_are_all_kept() -> None:
    draft = draft_of([0], [0])
    logits = torch.tensor([[[2.0, 1.0, 1.0, 1.0, 0.0]]])
    for option in ({"top_k_B": 2}, {"top_p_B": 0.6}, {"min_p_B": 0.3}):
        law = law_of(1, 5, temperature_B=1.0, **option)
        kept = process(logits, law, rows_of(draft)).allowed_BRV
        assert kept is not None
        assert kept.flatten().tolist() == [True] * 4 + [False]


def test_small_and_large_top_k_are_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = draft_of([0, 1], [0, 0])
    logits, law = logits_of(draft, 200), law_of(1, 200, temperature_B=1.0, top_k_B=9)
    small = floor_of(logits, law)
    monkeypatch.setattr(filters, "SMALL_K", 0)
    assert torch.equal(floor_of(logits, law), small)


def test_greedy_is_the_argmax_whatever_the_filters() -> None:
    draft = draft_of([0, 1, 2], [0, 0, 1])
    logits = logits_of(draft, 100)
    law = law_of(
        1, 100, top_k_B=1, top_p_B=0.1, min_p_B=0.9, needs=Needs(True, top_k=1, top_p=True)
    )
    choice = choose(process(logits, law, rows_of(draft)))
    assert torch.equal(choice.token_BR, logits.argmax(-1))


@pytest.mark.parametrize("vocab", [1, 2, 7, 31, 64, 1000, 49152])
@pytest.mark.parametrize("rows", [1, 3])
def test_equal_scores_go_to_the_lower_id(vocab: int, rows: int) -> None:
    draft = draft_of([0] * rows, [0] * rows)
    logits = torch.zeros(1, rows, vocab)
    for first in {0, vocab // 3, vocab - 1}:
        logits.fill_(0.0)[..., first:] = 1.0
        for law in (law_of(1, vocab), law_of(1, vocab, allowed_BV=torch.ones(1, vocab).bool())):
            choice = choose(process(logits, law, rows_of(draft)))
            assert choice.token_BR.tolist() == [[first] * rows]


@pytest.mark.parametrize("score", [-torch.inf, torch.finfo(torch.float32).min, -1e30, 0.0])
def test_a_single_allowed_token_is_chosen_whatever_its_score(score: float) -> None:
    vocab, draft = 9, draft_of([0], [0])
    allowed_BV = torch.arange(vocab)[None] == 5
    logits = torch.full((1, 1, vocab), 50.0)
    logits[..., 5] = score
    law = law_of(1, vocab, temperature_B=1.0, allowed_BV=allowed_BV)
    worst = torch.full((1, 1, vocab), -torch.inf)  # what noise without its clamp would be
    choice = choose(process(logits, law, replace(rows_of(draft), noise_BDV=worst)))
    assert choice.token_BR.tolist() == [[5]]


def test_min_tokens_bars_stop_ids_by_depth() -> None:
    draft = draft_of([1, 2, 3, 2], [0, 0, 1, 0])
    stop = torch.tensor([[6, 7, -1]])
    law = law_of(1, 8, min_tokens_B=4, output_B=3, stop_BS=stop)
    logits = torch.zeros(1, 4, 8)
    logits[..., 7] = 9.0
    logits[..., 6] = 8.0
    logits[..., 5] = 7.0
    # the root's choice is output token 4, number 5 is the first that may end the request
    choice = choose(process(logits, law, rows_of(draft)))
    assert choice.token_BR.tolist() == [[5, 7, 7, 7]]


def test_min_tokens_gives_way_where_only_stop_ids_are_allowed() -> None:
    draft = draft_of([1], [0])
    stop, allowed = torch.tensor([[6, 7]]), torch.arange(8)[None] >= 6
    law = law_of(1, 8, min_tokens_B=9, stop_BS=stop, allowed_BV=allowed)
    logits = torch.arange(8.0).flip(0)[None, None]
    assert choose(process(logits, law, rows_of(draft))).token_BR.tolist() == [[6]]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature_B": 1.0},
        {"temperature_B": 1.0, "top_k_B": 2},
        {"temperature_B": 1.0, "top_p_B": 0.5},
        {"temperature_B": 1.0, "min_p_B": 0.5},
        {"presence_B": 1.0},
        {"allowed_BV": torch.ones(2, 12, dtype=torch.bool)},
    ],
    ids=str,
)
def test_poisoned_logits_are_reported_for_that_request_only(
    poison: float, options: dict[str, object]
) -> None:
    draft = stacked([draft_of([1, 2], [0, 0])] * 2)
    logits = logits_of(draft, 12)
    logits[1, 0, 4] = poison
    verified = verify(logits, law_of(2, 12, **options), rows_of(draft))
    assert verified.broken_B.tolist() == [False, True]


def test_poison_off_the_path_harms_nobody() -> None:
    draft = draft_of([1, 2, 3], [0, 0, 0])
    logits = torch.zeros(1, 3, 5)
    logits[0, :, 2] = 1.0
    logits[0, 2] = torch.nan
    assert verify(logits, law_of(1, 5), rows_of(draft)).broken_B.tolist() == [False]


def test_a_drafter_may_hand_its_noise_over() -> None:
    draft = draft_of([1, 2, 3], [0, 0, 1])
    logits, law, rows = logits_of(draft, 30), law_of(1, 30, temperature_B=1.0), rows_of(draft)
    noise_BDV = noise_of(law, rows.length_B, rows.depth, 30)
    given_noise = process(logits, law, replace(rows, noise_BDV=noise_BDV))
    assert torch.equal(given_noise.scores_BRV, process(logits, law, rows).scores_BRV)


def test_the_callers_logits_are_not_written_to() -> None:
    draft = draft_of([1, 2], [0, 0])
    logits = logits_of(draft, 40)
    before = logits.clone()
    process(logits, everything(1, 40), rows_of(draft))
    process(logits, law_of(1, 40, temperature_B=1.0), rows_of(draft))
    assert torch.equal(logits, before)


def test_dtypes_are_kept_or_lifted() -> None:
    draft = draft_of([1, 2], [0, 0])
    for dtype, lifted in [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ]:
        got = process(logits_of(draft, 40).to(dtype), everything(1, 40), rows_of(draft))
        assert got.scores_BRV.dtype == got.logits_BRV.dtype == lifted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("top_k", [20, 500])
def test_a_verdict_is_a_tensor_program_of_fixed_shape(dtype: torch.dtype, top_k: int) -> None:
    draft = stacked([draft_of([1, 2, 3], [0, 0, 1], [4])] * 2)
    law, rows, logits = everything(2, 600), rows_of(draft), logits_of(draft, 600).to(dtype)
    law = replace(law, needs=replace(law.needs, top_k=top_k))
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        law, rows, logits, room = (
            faked(mode, x) for x in (law, rows, logits, torch.tensor([3, 4]))
        )
        verified = verify(logits, law, rows)
        cut = truncate(verified.verdict, law.stop_BS, room)
        for logprobs in (
            raw_logprobs(logits, cut.verdict, 5),
            processed_logprobs(verified.processed, law, cut.verdict, 5),
        ):
            assert logprobs.top_BDK.shape == (2, 3, 5)
    assert cut.verdict.emitted_BD.shape == (2, 3)


def faked(mode: FakeTensorMode, thing: Any) -> Any:
    """A record or tensor without data; whatever reads a value of it raises."""
    if isinstance(thing, Tensor):
        return mode.from_tensor(thing)
    if not is_dataclass(thing) or isinstance(thing, Needs):
        return thing
    return replace(thing, **{f.name: faked(mode, getattr(thing, f.name)) for f in fields(thing)})  # type: ignore[type-var]


def test_needs_are_the_union_of_the_requests() -> None:
    asked = [
        SamplingParams(temperature=0, top_k=900, min_p=0.5),
        SamplingParams(temperature=0.5, top_k=40, top_p=0.9),
        SamplingParams(temperature=0.5, top_k=70, presence_penalty=1, min_tokens=2),
        SamplingParams(temperature=0.5, top_k=1000),
    ]
    assert needs_of(asked, vocab=1000) == Needs(
        noise=True, penalties=True, min_tokens=True, top_k=70, top_p=True, min_p=False
    )
    assert needs_of(asked[:1], vocab=1000) == Needs()
    assert not needs_of([SamplingParams(temperature=0, top_p=0.5)], vocab=9).filters
