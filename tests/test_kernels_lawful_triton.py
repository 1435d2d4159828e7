"""Edits and filters in Triton against the torch chain: the same tokens, floors and broken rows.

Legend: B requests, R rows, V vocabulary.
"""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, MARKS
from verify_cases import draft_of, law_of, random_draft, rows_of, stacked

from furcate.kernels import lawful_triton, sample_triton
from furcate.kernels.backend import TORCH, Kernels
from furcate.kernels.backend_triton import TRITON
from furcate.kernels.draft import Draft
from furcate.verify.coupled import Verified, verify
from furcate.verify.filters import floor_of
from furcate.verify.law import Law, Needs, Rows
from furcate.verify.logprobs import processed_logprobs
from furcate.verify.process import Choice, Processed, choose, process

pytestmark = MARKS

INF, NAN = float("inf"), float("nan")
TIE = 1e-4  # closer scores may fall either way


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that every row has several and an odd rest."""
    monkeypatch.setattr(lawful_triton, "_EDITED", 64)
    monkeypatch.setattr(lawful_triton, "_SEARCHED", 64)
    monkeypatch.setattr(sample_triton, "_BLOCKS", 16)


def on(device: torch.device, thing: Any) -> Any:
    """A record or tensor on a device."""
    if isinstance(thing, Tensor):
        return thing.to(device)
    if isinstance(thing, Draft | Law | Rows):
        names = [f.name for f in fields(thing)]
        return replace(thing, **{n: on(device, getattr(thing, n)) for n in names})
    return thing


class Both:
    """One case by both chains."""

    def __init__(self, logits_BRV: Tensor, law: Law, rows: Rows) -> None:
        self.law, self.rows, self.logits_BRV = law, rows, logits_BRV
        self.processed: Processed = process(logits_BRV, law, rows)
        self.told: Choice = choose(self.processed)
        self.heard: dict[str, Tensor] = {}
        before = logits_BRV.clone()
        self.verified = self._heard()
        assert torch.equal(logits_BRV.nan_to_num(7.0), before.nan_to_num(7.0))

    def _heard(self) -> Verified:
        """What the kernels say, their choices listened to on the way to `accept`."""

        def accept(draft: Draft, token_BR: Tensor, depth: int, broken_BR: Tensor) -> Any:
            self.heard = {"token": token_BR.cpu(), "broken": broken_BR.cpu()}
            return TORCH.accept(draft, token_BR, depth, broken_BR)

        kernels: Kernels = replace(TRITON, accept=accept)
        law, rows = on(DEVICE, self.law), on(DEVICE, self.rows)
        return verify(self.logits_BRV.to(DEVICE), law, rows, kernels)

    def differing(self) -> int:
        """Live rows whose token or soundness is not the torch chain's, rounding ties aside."""
        live_BR = self._live()
        broken_BR = self.heard["broken"] != self.told.broken_BR
        other_BR = (self.heard["token"] != self.told.token_BR) & ~self.told.broken_BR
        return int(((broken_BR | other_BR & ~self._ties()) & live_BR).sum())

    def _live(self) -> Tensor:
        row_R = torch.arange(self.logits_BRV.shape[1])
        return row_R < self.rows.draft.live_B[:, None]

    def _ties(self) -> Tensor:
        """Rows whose two best scores lie too close to call."""
        scores_BRV, allowed_BRV = self.processed.scores_BRV, self.processed.allowed_BRV
        if allowed_BRV is not None:
            scores_BRV = scores_BRV.masked_fill(~allowed_BRV, -INF)
        if scores_BRV.shape[2] == 1:
            return torch.zeros(scores_BRV.shape[:2], dtype=torch.bool)
        best_BR2 = scores_BRV.topk(2, dim=2).values
        return (best_BR2[..., 0] - best_BR2[..., 1]).abs() < TIE


def logits_like(draft: Draft, vocab: int, seed: int = 0, ties: bool = False) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(*draft.tokens_BR.shape, vocab, generator=rng) * 3
    return logits.mul(4).round().div(4) if ties else logits


def lawful(batch: int, vocab: int, seed: int, names: str) -> Law:
    """A law of the named parts, each request with numbers of its own; a third is greedy."""
    rng = torch.Generator().manual_seed(seed)

    def spread(low: float, high: float) -> Tensor:
        return torch.rand(batch, generator=rng) * (high - low) + low

    def some(share: float) -> Tensor:
        return torch.rand(batch, vocab, generator=rng) < share

    warm_B = torch.where(torch.arange(batch) % 3 == 1, 0.0, spread(0.3, 1.8))
    parts: dict[str, dict[str, Any]] = {
        "k": {"top_k_B": torch.randint(0, vocab + 1, (batch,), generator=rng)},
        "p": {"top_p_B": spread(0.05, 1.0)},
        "m": {"min_p_B": spread(0.0, 0.3)},
        "bias": {"bias_BV": torch.randn(batch, vocab, generator=rng)},
        "allowed": {"allowed_BV": some(0.6) | (torch.arange(vocab) == vocab // 2)},
        "least": {
            "min_tokens_B": torch.randint(0, 5, (batch,), generator=rng),
            "stop_BS": torch.randint(-1, vocab, (batch, 5), generator=rng),
        },
        "penalties": {
            "repetition_B": spread(0.6, 1.8),
            "presence_B": spread(-1.0, 1.0),
            "frequency_B": spread(-1.0, 1.0),
            "prompt_BV": some(0.3),
            "counts_BV": torch.randint(0, 3, (batch, vocab), generator=rng),
        },
    }
    changes: dict[str, Any] = {"temperature_B": warm_B}
    changes |= {"seed_B": torch.randint(-(2**63), 2**63 - 1, (batch,), generator=rng)}
    for name in names.split():
        changes |= parts[name]
    return law_of(batch, vocab, **changes)


def trees(batch: int, rows: int, vocab: int, seed: int) -> Draft:
    rng = random.Random(seed)
    return stacked([random_draft(rng, rows, rng.randint(1, rows), 4, vocab) for _ in range(batch)])


def case(names: str, vocab: int = 130, rows: int = 4, seed: int = 0, ties: bool = False) -> Both:
    draft = trees(3, rows, vocab, seed)
    logits = logits_like(draft, vocab, seed, ties)
    return Both(logits, lawful(3, vocab, seed, names), rows_of(draft))


LAWS = (
    "k",
    "p",
    "m",
    "k p",
    "k p m",
    "bias",
    "allowed",
    "least",
    "penalties",
    "least allowed",
    "k p m bias allowed least penalties",
)


@pytest.mark.parametrize(
    ("names", "ties"), [*((n, False) for n in LAWS), *((n, True) for n in LAWS[:5])]
)
@pytest.mark.usefixtures("narrow")
def test_tokens_are_those_of_the_torch_chain(names: str, ties: bool) -> None:
    both = case(names, seed=len(names), ties=ties)
    assert both.differing() == 0
    assert not both.heard["broken"][both._live()].any()


@pytest.mark.parametrize("vocab", [1, 2, 3, 517])
def test_any_vocabulary_in_whole_tiles_too(vocab: int) -> None:
    assert case("k p m bias least penalties", vocab, rows=2, seed=vocab).differing() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("names", ["k p", "bias penalties p"])
def test_half_precision_is_lifted_first(dtype: torch.dtype, names: str) -> None:
    draft = trees(3, 4, 90, 1)
    both = Both(logits_like(draft, 90).to(dtype), lawful(3, 90, 1, names), rows_of(draft))
    assert both.differing() == 0
    assert both.verified.processed.logits_BRV.dtype == (dtype if names == "k p" else torch.float32)


def mutants() -> dict[str, dict[str, Any]]:
    """Laws that differ in one number from the one that is asked for."""
    return {
        "k": {"top_k_B": 4},
        "p": {"top_p_B": 0.45},
        "m": {"min_p_B": 0.2},
        "bias": {"bias_BV": torch.zeros(4, 130)},
        "allowed": {"allowed_BV": torch.ones(4, 130, dtype=torch.bool)},
        "least": {"min_tokens_B": 0},
        "penalties": {"frequency_B": -4.0},
    }


@pytest.mark.parametrize("name", list(mutants()))
def test_the_comparison_can_fail(name: str) -> None:
    draft = trees(4, 6, 130, 8)
    logits, law = logits_like(draft, 130, 8) / 2, lawful(4, 130, 8, name)
    if name == "least":  # every token but a few would end the request
        law = replace(law, stop_BS=torch.arange(120).expand(4, -1).contiguous())
    both = Both(logits, law, rows_of(draft))
    assert both.differing() == 0
    changes = {
        n: torch.full((4,), v) if not isinstance(v, Tensor) else v
        for n, v in mutants()[name].items()
    }
    both.processed = process(logits, replace(law, **changes), both.rows)
    both.told = choose(both.processed)
    assert both.differing() > 0


def floors(logits_BRV: Tensor, law: Law) -> tuple[Tensor, Tensor]:
    """(the kernel's, the reference's), [B, R]."""
    draft = stacked(
        [draft_of([1] * logits_BRV.shape[1], [0] * logits_BRV.shape[1])] * len(logits_BRV)
    )
    both = Both(logits_BRV, law, rows_of(draft))
    floor_BR = both.verified.processed.floor_BR
    assert floor_BR is not None
    return floor_BR.cpu(), floor_of(logits_BRV.float(), law)[..., 0]


def odd_rows(vocab: int) -> Tensor:
    """Rows that a search could stumble over: ties, zeros of both signs, huge spans, tiny steps."""
    rng = torch.Generator().manual_seed(vocab)
    smooth = torch.randn(vocab, generator=rng) * 3
    rows = [
        smooth,
        smooth.round(),
        torch.zeros(vocab),
        torch.where(torch.arange(vocab) % 2 == 0, 0.0, -0.0),
        smooth.masked_fill(torch.rand(vocab, generator=rng) < 0.7, -INF),
        smooth.masked_fill(torch.rand(vocab, generator=rng) < 0.3, -1e30),
        smooth * 1e-42,  # subnormal numbers
        smooth * 1e37,
        1 + torch.arange(vocab).flip(0) * 2.0**-23,  # neighbours
        torch.where(torch.arange(vocab) == 3, 3e38, -3e38),
        torch.where(torch.arange(vocab) == vocab - 1, 1.0, -INF),
    ]
    return torch.stack(rows)[None]


@pytest.mark.parametrize("top_k", [1, 2, 7, 40, 99])
@pytest.mark.usefixtures("narrow")
def test_the_floor_of_top_k_is_that_of_sorting_bit_for_bit(top_k: int) -> None:
    logits = odd_rows(100)
    law = law_of(1, 100, temperature_B=1.0, top_k_B=top_k)
    heard, told = floors(logits, law)
    assert torch.equal(heard, told)
    assert torch.equal(told, logits.sort(-1, descending=True).values[..., top_k - 1])


@pytest.mark.parametrize("top_k", [0, 30])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999])
@pytest.mark.usefixtures("narrow")
def test_the_floor_of_top_p_is_the_highest_score_with_the_mass(top_p: float, top_k: int) -> None:
    """Held against sums in float64."""
    logits = odd_rows(100)
    law = law_of(1, 100, temperature_B=0.8, top_k_B=top_k, top_p_B=top_p)
    heard, _ = floors(logits, law)
    for row, floor in zip(logits[0], heard[0], strict=True):
        assert (row == floor).any(), "a score that exists"
        left = row.double()
        if top_k:
            left = left.masked_fill(row < row.sort(descending=True).values[top_k - 1], -INF)
        chance = (left / 0.8).softmax(0)
        assert chance[row >= floor].sum() >= top_p - 1e-6
        assert chance[row > floor].sum() < top_p + 1e-6


def test_ties_at_a_floor_are_all_kept() -> None:
    logits = torch.tensor([[[2.0, 1.0, 1.0, 1.0, 0.0, 1.0]]])
    for option in ({"top_k_B": 2}, {"top_p_B": 0.5}, {"min_p_B": 0.3}):
        heard, _ = floors(logits, law_of(1, 6, temperature_B=1.0, **option))
        assert (logits[0, 0] >= heard).flatten().tolist() == [True] * 4 + [False, True], option


def test_one_token_may_be_all_that_is_left() -> None:
    draft, vocab = stacked([draft_of([1, 2], [0, 0])] * 3), 70
    logits = logits_like(draft, vocab, 4)
    only = torch.arange(vocab) == 41
    for change in (
        {"allowed_BV": only.expand(3, -1).contiguous()},
        {"top_k_B": 1},
        {"top_p_B": 1e-9},
        {"min_p_B": 1.0},
        {"bias_BV": torch.where(only, 0.0, -INF).expand(3, -1).contiguous()},
    ):
        for temperature in (0.0, 1.5):
            law = law_of(3, vocab, temperature_B=temperature, **change)
            both = Both(logits, law, rows_of(draft))
            assert both.differing() == 0 and not both.heard["broken"].any()


@pytest.mark.parametrize("score", [-INF, torch.finfo(torch.float32).min, -1e30, 0.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_single_allowed_token_is_chosen_whatever_its_score(
    score: float, temperature: float
) -> None:
    vocab, draft = 9, draft_of([0], [0])
    logits = torch.full((1, 1, vocab), 50.0)
    logits[..., 5] = score
    law = law_of(1, vocab, temperature_B=temperature, allowed_BV=torch.arange(vocab)[None] == 5)
    both = Both(logits, law, rows_of(draft))
    assert both.heard["token"].tolist() == [[5]] and both.differing() == 0


def test_penalties_see_a_rows_own_path_and_no_other() -> None:
    draft = draft_of([1, 2, 4, 2, 5, 2], [0, 0, 1, 2, 0, 4])
    logits = torch.zeros(1, 6, 8)
    logits[..., 2], logits[..., 4], logits[..., 7] = 1.0, 0.6, 0.0
    law = law_of(1, 8, frequency_B=0.25, counts_BV=torch.zeros(1, 8, dtype=torch.int64))
    both = Both(logits, law, rows_of(draft))
    edited = both.verified.processed.logits_BRV.cpu()
    assert torch.equal(edited, both.processed.logits_BRV)
    assert edited[0, :, 2].tolist() == [1.0, 0.75, 0.75, 0.5, 1.0, 0.75]
    once = [0.6, 0.6, 0.35, 0.35, 0.6, 0.6]
    assert edited[0, :, 4].tolist() == pytest.approx(once)


def test_min_tokens_gives_way_where_only_stop_ids_are_allowed() -> None:
    draft = draft_of([1, 2], [0, 0])
    stop, allowed = torch.tensor([[6, 7]]), torch.arange(8)[None] >= 6
    law = law_of(1, 8, min_tokens_B=9, stop_BS=stop, allowed_BV=allowed)
    logits = torch.arange(8.0).flip(0).expand(1, 2, -1).contiguous()
    both = Both(logits, law, rows_of(draft))
    assert both.heard["token"].tolist() == [[6, 6]] and both.differing() == 0


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("names", ["", "k", "p", "m", "k p", "bias", "penalties", "least"])
def test_poison_is_reported_for_its_request_alone(poison: float, names: str) -> None:
    draft = stacked([draft_of([1, 2], [0, 0])] * 4)
    logits = logits_like(draft, 50)
    logits[2, :, 49] = poison
    both = Both(logits, lawful(4, 50, 3, names), rows_of(draft))
    assert both.differing() == 0
    assert both.verified.broken_B.tolist() == [False, False, True, False]


def test_poison_at_a_forbidden_token_harms_nobody() -> None:
    draft = draft_of([1], [0])
    logits = torch.zeros(1, 1, 8)
    logits[..., 3] = NAN
    allowed = torch.arange(8)[None] != 3
    for filters in ({}, {"top_p_B": 0.9}):
        law = law_of(1, 8, temperature_B=1.0, allowed_BV=allowed, **filters)
        both = Both(logits, law, rows_of(draft))
        assert both.differing() == 0 and not both.verified.broken_B.any()


def test_greedy_requests_are_not_filtered() -> None:
    draft = stacked([draft_of([1, 2], [0, 0])] * 2)
    law = law_of(2, 40, top_k_B=1, top_p_B=0.1, min_p_B=0.9)
    law = replace(law, needs=Needs(True, top_k=1, top_p=True, min_p=True))
    both = Both(logits_like(draft, 40), law, rows_of(draft))
    assert both.differing() == 0
    floor_BR = both.verified.processed.floor_BR
    assert floor_BR is not None and (floor_BR == -INF).all()


@pytest.mark.usefixtures("narrow")
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    draft = trees(4, 3, 130, 2)
    law, rows = lawful(4, 130, 2, "k p m bias penalties"), rows_of(draft)
    logits = logits_like(draft, 130, 2)
    all_ = Both(logits, law, rows)
    for b in range(4):
        one = slice(b, b + 1)
        part = [
            replace(
                x,
                **{
                    f.name: getattr(x, f.name)[one]
                    for f in fields(x)
                    if isinstance(getattr(x, f.name), Tensor)
                },
            )
            for x in (law, draft)
        ]
        alone = Both(logits[one], part[0], replace(rows_of(part[1]), depth=rows.depth))  # type: ignore[arg-type]
        assert torch.equal(alone.heard["token"], all_.heard["token"][one])
        floors = [x.verified.processed.floor_BR for x in (alone, all_)]
        assert floors[0] is not None and floors[1] is not None
        assert torch.equal(floors[0], floors[1][one])


def test_logprobs_of_the_law_as_sampled_are_the_same() -> None:
    draft = trees(4, 5, 60, 6)
    for names in ("k p", "bias penalties allowed", "k p m bias allowed least penalties"):
        law, rows = lawful(4, 60, 6, names), rows_of(draft)
        both = Both(logits_like(draft, 60, 6), law, rows)
        told = verify(both.logits_BRV, law, rows)
        heard = processed_logprobs(
            both.verified.processed, on(DEVICE, law), both.verified.verdict, 5
        )
        other = processed_logprobs(told.processed, law, told.verdict, 5)
        torch.testing.assert_close(heard.top_BDK.cpu(), other.top_BDK)
        torch.testing.assert_close(heard.chosen_BD.cpu(), other.chosen_BD)


@pytest.mark.gpu
def test_a_large_vocabulary_on_the_device_keeps_its_tokens() -> None:
    draft = trees(8, 32, 49152, 3)
    for names in ("k p", "p m", "k p m bias allowed least penalties"):
        law = lawful(8, 49152, 3, names)
        assert Both(logits_like(draft, 49152, 3), law, rows_of(draft)).differing() == 0
