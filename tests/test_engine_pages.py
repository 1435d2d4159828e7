"""Pages: fought for, given up, given back, and never anybody else's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_engine import (
    VOCAB,
    Script,
    finished,
    free_pages,
    ids,
    judged,
    prompt_of,
    tiny_engine,
    twins,
)

from furcate.config import SamplingParams
from furcate.drafters.adversary import Adversary
from furcate.engine.engine import Engine
from furcate.engine.request import Phase

Ask = tuple[list[int], SamplingParams]


def params(seed: int = 3, **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, "seed": seed, "ignore_eos": True, **more})


def fighters(count: int, seed: int) -> list[Ask]:
    """Requests that begin small and grow, so that the pool runs out while they decode."""
    rng = random.Random(seed)
    law = ({"temperature": 0}, {"temperature": 1.0}, {"top_p": 0.9, "frequency_penalty": 0.7})
    return [
        (prompt_of(rng.randint(1, 20), n), params(n, max_tokens=rng.randint(40, 76), **law[n % 3]))
        for n in range(count)
    ]


def streams_of(asked: list[Ask]) -> list[list[int]]:
    return [[*prompt, *judged(prompt, p)] for prompt, p in asked]


def answers(asked: list[Ask], streams: list[list[int]]) -> list[list[int]]:
    return [stream[len(prompt) :] for (prompt, _), stream in zip(asked, streams, strict=True)]


def preempt_somebody(engine: Engine, rng: random.Random) -> None:
    """Any running request gives way, whatever it is doing, and perhaps loses what was kept."""
    scheduler = engine.built.scheduler
    if scheduler.running and rng.random() < 0.8:
        victim = rng.choice(scheduler.running)
        engine.built.round.state.release(victim.slot)
        scheduler.preempt(victim)
    if rng.random() < 0.3:
        scheduler.book.prefixes.clear()


@pytest.mark.parametrize("drafter", ["off", "ngram", "any"])
def test_forced_preemptions_change_no_token(drafter: str) -> None:
    asked, rng = fighters(10, seed=17), random.Random(2)
    streams = streams_of(asked)
    guess = Adversary(streams, "any", vocab=VOCAB) if drafter == "any" else drafter
    with tiny_engine(
        guess,
        max_batch=6,
        prefill_chunk=16,
        draft=None if guess == "off" else {"num_draft_tokens": 4},
    ) as engine:
        before = engine.built.scheduler.book.pool.free
        names = [engine.submit(*ask) for ask in asked]
        while engine.step():
            preempt_somebody(engine, rng)
        outputs = finished(engine, names)
        assert free_pages(engine) == before
    assert [list(output.token_ids) for output in outputs] == answers(asked, streams)
    assert sum(output.stats.preemptions for output in outputs) >= 40, "120 with three drafters"


@pytest.mark.parametrize("drafter", ["off", "any", "model"])
def test_requests_that_fight_for_pages_give_way_and_come_back(drafter: str) -> None:
    asked = fighters(12, seed=17)
    streams = streams_of(asked)
    guess = Adversary(streams, "any", vocab=VOCAB) if drafter == "any" else drafter
    with tiny_engine(guess, max_batch=6, kv_tokens=96, prefill_chunk=9) as engine:
        outputs = finished(engine, [engine.submit(*ask) for ask in asked])
        assert free_pages(engine) == 6
    assert [list(output.token_ids) for output in outputs] == answers(asked, streams)
    assert sum(output.stats.preemptions for output in outputs) >= 4


def test_requests_with_room_are_not_preempted() -> None:
    with tiny_engine("off", max_batch=6) as engine:
        outputs = finished(engine, [engine.submit(*ask) for ask in fighters(6, seed=17)])
    assert sum(output.stats.preemptions for output in outputs) == 0


def test_speculation_gives_way_before_a_request_does() -> None:
    stream = [*ids("ab" * 3), *ids("cdefgijk" * 12)]
    prompt, p = stream[:6], params(temperature=0, max_tokens=26)
    with tiny_engine(twins([stream]), target=Script(stream), max_batch=3, kv_tokens=96) as engine:
        outputs = finished(engine, [engine.submit(prompt, p) for _ in range(3)])
        assert free_pages(engine) == 6
    assert [o.stats.preemptions for o in outputs] == [0, 0, 0]
    assert all(list(o.token_ids) == stream[6:32] for o in outputs)
    assert any(o.stats.drafted < 5 * o.stats.rounds for o in outputs), "some rounds had one row"
    assert all(o.stats.accepted > 0 for o in outputs), "and some had more"


def test_the_slot_of_a_preempted_request_is_cleared() -> None:
    with tiny_engine("off", max_batch=4, kv_tokens=64) as engine:
        for ask in fighters(4, seed=3):
            engine.submit(*ask)
        state, scheduler = engine.built.round.state, engine.built.scheduler
        while not any(request.stats.preemptions for request in scheduler.waiting):
            engine.step()
        taken = {request.slot for request in scheduler.running}
        for slot in set(range(4)) - taken:
            assert int(state.length_C[slot]) == 0
            assert not state.table_CP[slot].any(), "an idle slot points at nobody's pages"


def started(engine: Engine, until: Callable[[Engine], bool], ask: Ask) -> str:
    name = engine.submit(*ask)
    while not until(engine):
        assert engine.step()
    return name


def _waiting(engine: Engine) -> bool:
    return bool(engine.built.scheduler.waiting)


def _in_phase(phase: Phase) -> Callable[[Engine], bool]:
    def check(engine: Engine) -> bool:
        running = engine.built.scheduler.running
        return any(r.phase is phase and r.ask.prompt[0] == MARK for r in running)

    return check


def _preempted(engine: Engine) -> bool:
    return any(
        r.stats.preemptions and r.ask.prompt[0] == MARK for r in engine.built.scheduler.waiting
    )


MARK = VOCAB - 1
PHASES = {
    "waiting": _waiting,
    "prefill": _in_phase(Phase.PREFILL),
    "decode": _in_phase(Phase.DECODE),
    "preempted": _preempted,
}


@pytest.mark.parametrize("drafter", ["off", "ngram"])
@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_at_any_phase_gives_its_pages_back(phase: str, drafter: str) -> None:
    kv = 96 if phase == "preempted" else 512
    other = (prompt_of(20, seed=4), params(8, max_tokens=60))
    with tiny_engine(drafter, max_batch=2, max_context=96, kv_tokens=kv, prefill_chunk=8) as engine:
        pool = engine.built.scheduler.book.pool
        names = [engine.submit(*other)]
        ask = ([MARK, *prompt_of(30, seed=5)], params(9, max_tokens=60))
        name = started(engine, PHASES[phase], ask)
        engine.abort(name)
        assert engine.next_piece(name) is None
        assert all(r.ask.request_id != name for r in engine.built.scheduler.running)
        (output,) = finished(engine, names)
        assert free_pages(engine) == pool.count
    assert list(output.token_ids) == judged(*other)


def test_an_abort_of_n_answers_ends_all_of_them() -> None:
    with tiny_engine("ngram", max_batch=2) as engine:
        name = engine.submit(prompt_of(40), params(n=5))
        for _ in range(6):
            engine.step()
        engine.abort(name)
        assert free_pages(engine) == engine.built.scheduler.book.pool.count


def test_aborting_twice_or_a_stranger_does_nothing() -> None:
    with tiny_engine("off") as engine:
        name = engine.submit(prompt_of(4), params())
        engine.abort(name)
        engine.abort(name)
        engine.abort("request-77")


@pytest.mark.parametrize("drafter", ["off", "ngram"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 63])
@pytest.mark.parametrize("n", [1, 2])
def test_one_request_may_use_up_the_whole_pool(drafter: str, length: int, n: int) -> None:
    prompt, p = prompt_of(length), params(max_tokens=None, n=n)
    with tiny_engine(drafter, kv_tokens=64) as engine:
        output = engine.collect(engine.submit(prompt, p))
        assert free_pages(engine) == 4
    assert output.finish_reason == "length"
    assert list(output.token_ids) == judged(prompt, p, context=64)
    assert all(len(choice.token_ids) == 64 - length for choice in output.choices)


@pytest.mark.parametrize("common", [0, 16, 40, 60, 62])
def test_a_full_prefix_index_never_locks_a_request_out(common: int) -> None:
    first = prompt_of(60)
    second = [*first[:common], *prompt_of(63 - common, seed=9)]
    with tiny_engine("off", kv_tokens=64) as engine:
        engine.collect(engine.submit(first, params(max_tokens=None)))
        assert engine.built.scheduler.book.pool.free == 0
        name = engine.submit(second, params(max_tokens=None))
        for _ in range(20):
            engine.step()
        assert not engine.built.scheduler.busy
        output = engine.collect(name)
    assert list(output.token_ids) == judged(second, params(max_tokens=None), context=64)


def test_no_key_is_written_outside_a_requests_own_pages() -> None:
    asked = fighters(8, seed=23)
    streams = streams_of(asked)
    guess = Adversary(streams, "any", vocab=VOCAB)
    with tiny_engine(guess, max_batch=4, kv_tokens=2048, max_context=128) as engine:
        book, cache = engine.built.scheduler.book, engine.built.round.target.cache
        pools = (cache.k_LSKD, cache.v_LSKD)
        for pool in pools:
            pool[:, cache.shape.page_size :] = torch.nan  # a canary, and poison to whoever reads it
        owned: set[int] = set()
        take = book.pool.take

        def noted(wanted: int) -> list[int]:
            got = take(wanted)
            owned.update(got)
            return got

        book.pool.take = noted  # type: ignore[method-assign]
        outputs = finished(engine, [engine.submit(*ask) for ask in asked])
        assert [list(o.token_ids) for o in outputs] == answers(asked, streams)
        for pool in pools:
            written = ~pool.isnan().view(len(pool), -1, cache.shape.page_size, *pool.shape[2:])
            pages = written.flatten(2).any(2).any(0).nonzero()[:, 0].tolist()
            assert set(pages) - {0} <= owned
    assert 0 < len(owned) < book.pool.count


@pytest.mark.parametrize("left", range(1, 7))
def test_tree_slots_at_the_end_of_the_context_stay_inside_the_request(left: int) -> None:
    prompt, p = prompt_of(128 - left), params(max_tokens=None)
    neighbour = (prompt_of(100, seed=2), params(7, max_tokens=25))
    streams = [[*ask[0], *judged(*ask, context=128)] for ask in ((prompt, p), neighbour)]
    guess = twins(streams)
    with tiny_engine(guess, max_context=128, kv_tokens=512, max_batch=2) as engine:
        names = [engine.submit(*neighbour), engine.submit(prompt, p)]
        outputs = finished(engine, names)
        assert free_pages(engine) == engine.built.scheduler.book.pool.count
    assert list(outputs[0].token_ids) == streams[1][100:]
    assert list(outputs[1].token_ids) == streams[0][128 - left :]
    assert outputs[1].finish_reason == "length"
