"""Where rounds and prompts write: a request's own places and the scratch page, nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from kv_cases import bits, dense_keys
from small_models import tiny_decoder
from tiny_engine import VOCAB, decoder, judged, prompt_of, tiny_engine
from torch import Tensor

from furcate.config import SamplingParams
from furcate.drafters.adversary import Adversary
from furcate.drafters.base import Drafter
from furcate.engine.loop import Loop
from furcate.engine.request import Phase, Request
from furcate.engine.round import Batch, Emitted
from furcate.verify.law import needs_of

ROWS = 16
CONTEXT = 64
NAN = float("nan")
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, seed=0)


class Stage:
    """A loop whose rounds are played by hand, so that each can be looked at."""

    def __init__(self, drafter: str | Drafter = "off", **options: int) -> None:
        self.engine = tiny_engine(drafter, max_batch=4, **options)
        self.loop = Loop(self.engine.built)
        self.cache = self.loop.round.target.cache
        self.cache.k_LSKD[:, self.cache.shape.page_size :] = NAN
        self.cache.v_LSKD[:, self.cache.shape.page_size :] = NAN

    def admit(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Request]:
        """Take all of them in and score their prompts."""
        asked = [r for i, p in enumerate(prompts) for r in self.loop.submit(str(i), p, params)]
        scheduler, state = self.loop.scheduler, self.loop.state
        for request in scheduler.admit():
            state.admit(request.slot, request)
            state.set_pages(request.slot, request.pages.numbers)
        while (chunk := scheduler.next_chunk()) is not None:
            self.loop._prefill(chunk)
        assert all(request.phase is Phase.DECODE for request in asked)
        return asked

    @torch.inference_mode()
    def play(self, players: list[Request], idle: Sequence[int], rows: int = ROWS) -> Emitted:
        """One round of the players and of the slots in `idle`."""
        state = self.loop.state
        for request in players:
            book = self.loop.scheduler.book
            book.reserve(request.pages, request.cached, request.cached + rows)
            state.set_pages(request.slot, request.pages.numbers)
        slots = [request.slot for request in players] + list(idle)
        batch = Batch(
            slot_B=torch.tensor(slots),
            allowance_B=torch.tensor([rows - b % 3 for b in range(len(slots))]),
            rows=rows,
            columns=max([request.committed for request in players], default=1) + rows,
            needs=needs_of([GREEDY], VOCAB),
            levels=max(self.loop.round.drafter.depths, default=0),
        )
        return self.loop.round.play(batch)

    def changed(self, before: tuple[Tensor, Tensor]) -> set[int]:
        """Slots in which some bit differs from before."""
        after = (self.cache.k_LSKD, self.cache.v_LSKD)
        differs = [bits(new) != bits(old) for new, old in zip(after, before, strict=True)]
        return set((differs[0] | differs[1]).flatten(2).any(2).any(0).nonzero()[:, 0].tolist())

    def places(self, request: Request, end: int, start: int = 0) -> list[int]:
        size = self.cache.shape.page_size
        numbers = request.pages.numbers
        return [numbers[p // size] * size + p % size for p in range(start, end)]

    def snapshot(self) -> tuple[Tensor, Tensor]:
        return self.cache.k_LSKD.clone(), self.cache.v_LSKD.clone()

    def gap(self, request: Request) -> float:
        """Distance of the cached keys and values from those of one dense pass."""
        plain = dense_keys(decoder(), request.tokens[: request.cached])
        slots = self.places(request, request.cached)
        cache = self.cache
        gaps = (cache.k_LSKD[:, slots] - plain.k_SKD, cache.v_LSKD[:, slots] - plain.v_SKD)
        return max(float(gap.abs().nan_to_num(nan=torch.inf).max()) for gap in gaps)


def take(players: list[Request], emitted: Emitted) -> None:
    """What the loop notes after a round."""
    assert not emitted.broken_B.any()
    for b, request in enumerate(players):
        count = int(emitted.count_B[b])
        request.output.extend(emitted.tokens_BD[b, :count].tolist())
        request.cached += count


@pytest.mark.parametrize("shape", ["any", "chain", "star", "twins"])
@pytest.mark.parametrize("left", [(1, 2, 3), (4, 9, 15), (16, 17, 40)])
def test_a_round_writes_the_rows_own_places_and_scratch(shape: str, left: tuple[int, ...]) -> None:
    """At every distance from the end of the context; the dummy and a released slot play along."""
    prompts = [prompt_of(CONTEXT - n, seed) for seed, n in enumerate(left)]
    streams = [p + judged(p, GREEDY, context=CONTEXT) for p in prompts]
    guess = Adversary(streams, shape, vocab=VOCAB)
    stage = Stage(guess, kv_tokens=1024, max_context=CONTEXT)
    requests = stage.admit(prompts, GREEDY)
    state = stage.loop.state
    state.release(3)
    idle = [state.dummy, 3, state.dummy]
    size = stage.cache.shape.page_size
    while any(len(r.tokens) < CONTEXT for r in requests):
        before = stage.snapshot()
        start = [request.cached for request in requests]
        emitted = stage.play(requests, idle)
        own = set(range(size))
        for request, at, drafted in zip(requests, start, emitted.drafted_B.tolist(), strict=False):
            own.update(stage.places(request, at + drafted + 1, at))
        assert stage.changed(before) <= own
        assert emitted.count_B[len(requests) :].tolist() == [0] * len(idle)
        take(requests, emitted)
        assert all(stage.gap(request) <= 1e-10 for request in requests)
    assert [list(r.tokens) for r in requests] == streams
    assert state.length_C[state.dummy] == 0
    for pool in (stage.cache.k_LSKD, stage.cache.v_LSKD):
        assert pool[:, :size].isfinite().all(), "the scratch page reads as finite numbers"


def test_finished_and_released_slots_write_to_scratch_alone() -> None:
    stage = Stage(Adversary([], "bushy", vocab=VOCAB), kv_tokens=512, max_context=CONTEXT)
    first, second = stage.admit([prompt_of(20), prompt_of(30, 1)], GREEDY)
    take([first, second], stage.play([first, second], []))
    slot = first.slot
    stage.loop.scheduler.finish(first)
    stage.loop.state.release(slot)
    before, start = stage.snapshot(), second.cached
    stage.play([second], [slot, stage.loop.state.dummy])
    own = set(stage.places(second, start + ROWS, start))
    assert stage.changed(before) <= own | set(range(stage.cache.shape.page_size))


def test_the_check_of_places_can_fail() -> None:
    stage = Stage("off", kv_tokens=256)
    (request,) = stage.admit([prompt_of(20)], GREEDY)
    before = stage.snapshot()
    stage.cache.v_LSKD[1, stage.places(request, 19)[-1], 0, 3] += 1e-12
    assert stage.changed(before) == {stage.places(request, 19)[-1]}


@pytest.mark.parametrize("chunk", [1, 7, 64, 256])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 130])
def test_a_prompt_has_the_same_keys_whatever_its_chunks(chunk: int, length: int) -> None:
    stage = Stage("off", kv_tokens=512, prefill_chunk=chunk)
    prompt = prompt_of(length)
    (request,) = stage.admit([prompt], GREEDY)
    assert request.cached == length - 1
    if length > 1:
        assert stage.gap(request) <= 1e-10
    own = set(stage.places(request, length - 1)) | set(range(stage.cache.shape.page_size))
    assert stage.changed(fresh(stage)) <= own, "no key of the last token, none beyond"


def fresh(stage: Stage) -> tuple[Tensor, Tensor]:
    """The pools as a Stage makes them."""
    pools = tuple(torch.full_like(pool, NAN) for pool in stage.snapshot())
    for pool in pools:
        pool[:, : stage.cache.shape.page_size] = 0
    return pools[0], pools[1]


@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("common", [1, 15, 16, 17, 37, 48])
def test_a_prompt_that_finds_part_of_its_keys_has_the_same_keys(chunk: int, common: int) -> None:
    stage = Stage("off", kv_tokens=512, prefill_chunk=chunk)
    first = prompt_of(50)
    (request,) = stage.admit([first], GREEDY)
    kept = stage.places(request, request.cached)
    stage.loop.scheduler.finish(request)
    before = stage.snapshot()
    other = (first[common] + 1) % VOCAB
    (again,) = stage.admit([[*first[:common], other, *prompt_of(20, 5)]], GREEDY)
    assert again.stats.reused_tokens == common
    assert stage.gap(again) <= 1e-10
    assert not stage.changed(before) & set(kept), "what was cached stays as it was"


@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_answers_that_share_a_prompt_have_the_same_keys(chunk: int) -> None:
    stage = Stage("off", kv_tokens=512, prefill_chunk=chunk)
    loop = stage.loop
    asked = loop.submit("a", prompt_of(21), GREEDY.model_copy(update={"n": 3, "max_tokens": 6}))
    while loop.scheduler.busy:
        loop.step()
        for request in asked:
            if request.phase is Phase.DECODE:
                assert stage.gap(request) <= 1e-10


@pytest.mark.parametrize("together", [True, False])
def test_one_requests_broken_numbers_do_not_reach_another(together: bool) -> None:
    """A token whose embedding is NaN breaks the request that holds it, and nobody else."""
    cursed = tiny_decoder(torch.float64, 0, VOCAB)
    token = 7
    cursed.embedding[token] = NAN
    sane = [t for t in range(3, VOCAB) if t != token]
    good, bad = sane[5:40], [sane[0], token, *sane[1:60]]
    guess = Adversary([], "single", vocab=7)  # its few nodes leave most rows to pads
    with tiny_engine(guess, target=cursed, max_batch=4) as engine:
        params = GREEDY.model_copy(update={"max_tokens": 8})
        if together:
            name = engine.submit(good, params)
            engine.step()
            broken = engine.collect(engine.submit(bad, params))
            fine = engine.collect(name)
        else:  # the good one gets the pages of the bad one
            broken, fine = (engine.collect(engine.submit(p, params)) for p in (bad, good))
    with tiny_engine("off", target=cursed) as alone:
        want = alone.collect(alone.submit(good, params))
    assert broken.finish_reason == "error"
    assert fine.finish_reason == "length"
    assert fine.token_ids == want.token_ids
