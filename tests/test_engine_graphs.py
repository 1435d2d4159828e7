"""Rounds played from recordings say what launched rounds say, whoever comes and goes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_graphs import FakeRecorder, recorded
from test_engine_traffic import arriving_at_random, asks
from tiny_engine import VOCAB, finished, free_pages, judged, prompt_of, tiny_engine
from tiny_heads import around, network

from furcate.config import SamplingParams
from furcate.drafters.adversary import Adversary
from furcate.engine.emitted import Emitted, packed, unpacked
from furcate.engine.graphs import MOST_BROKEN, CudaRecorder, Graphs
from furcate.engine.player import Outcome
from furcate.engine.report import backend_json
from furcate.engine.round import Batch
from furcate.verify.law import Needs
from furcate.verify.logprobs import Logprobs

GREEDY = SamplingParams(temperature=0, max_tokens=20, seed=1, ignore_eos=True)


@pytest.mark.parametrize("drafter", ["off", "ngram", "any", "model", "eagle3", "medusa"])
def test_whoever_comes_and_goes_every_answer_is_that_of_the_slow_loop(drafter: str) -> None:
    asked = asks(12, seed=3)
    want = [judged(prompt, params) for prompt, params in asked]
    streams = [[*prompt, *tokens] for (prompt, _), tokens in zip(asked, want, strict=True)]
    guess: Any = drafter
    if drafter == "any":
        guess = Adversary(streams, "any", vocab=VOCAB)
    elif drafter in ("eagle3", "medusa"):
        guess = around(network(drafter), max_batch=5)
    engine, recorder = recorded(guess, max_batch=5, prefill_chunk=9)
    with engine:
        before = engine.built.scheduler.book.pool.free
        assert arriving_at_random(engine, asked, seed=3) == want
        assert free_pages(engine) == before
        played = engine.built.player.played
    assert played.eager == 0 and played.refused == {}
    assert played.replayed == len(recorder.repeats) > len(played.recorded)


def test_a_bucket_serves_every_batch_below_it() -> None:
    """Sixteen come one by one and go one by one: every batch from 1 to 16, in five kinds."""
    engine, recorder = recorded("off", max_batch=16)
    most = GREEDY.model_copy(update={"max_tokens": 18})
    asked = [(prompt_of(5 + 4 * n, n), most.model_copy(update={"seed": n})) for n in range(16)]
    sizes: list[int] = []
    with engine:
        engine._loop.player = _Noting(engine.built.player, sizes)
        names = []
        for ask in asked:
            names.append(engine.submit(*ask))
            engine.step()
        outputs = finished(engine, names)
    assert [list(o.token_ids) for o in outputs] == [judged(*ask) for ask in asked]
    assert set(sizes) == set(range(1, 17))
    assert recorder.count == 5


@pytest.mark.parametrize("drafter", ["off", "ngram"])
def test_as_many_as_64_of_different_lengths_say_what_the_slow_loop_says(drafter: str) -> None:
    """All begin together, with prompts and answers of many lengths, under one law of seven."""
    asked = asks(64, seed=7, most=16)
    assert len({len(prompt) for prompt, _ in asked}) > 30
    engine, _ = recorded(drafter, max_batch=64)
    sizes: list[int] = []
    with engine:
        engine._loop.player = _Noting(engine.built.player, sizes)
        names = [engine.submit(*ask) for ask in asked]
        with pytest.MonkeyPatch.context() as patch:  # nobody plays before all prompts are scored
            patch.setattr(engine.built.scheduler, "decoding", list)
            for _ in asked:
                engine.step()
        outputs = finished(engine, names)
        played = engine.built.player.played
    assert [list(o.token_ids) for o in outputs] == [judged(*ask) for ask in asked]
    assert max(sizes) == 64 and len(set(sizes)) > 4
    assert played.eager == 0 and played.refused == {}


class _Noting:
    """A player that notes the size of every batch."""

    def __init__(self, inner: Any, sizes: list[int]) -> None:
        self.inner, self.sizes = inner, sizes
        self.records, self.ahead, self.played = inner.records, inner.ahead, inner.played

    def launch(self, batch: Batch) -> Outcome:
        self.sizes.append(len(batch.slot_B))
        outcome: Outcome = self.inner.launch(batch)
        return outcome


def test_rows_of_nobody_touch_no_page_but_the_scratch_page() -> None:
    engine, _ = recorded("ngram", max_batch=8, kv_tokens=1024)
    with engine:
        other = engine.submit(prompt_of(40, 4), GREEDY)
        for _ in range(4):
            engine.step()
        request = engine._open[other][0]
        cache, size = engine.built.round.target.cache, engine.built.options.page_size
        held = [p * size + i for p in request.pages.numbers for i in range(size)]
        free = torch.ones(cache.k_LSKD.shape[1], dtype=torch.bool)
        free[held], free[:size] = False, False
        for pool in (cache.k_LSKD, cache.v_LSKD):
            pool[:, free] = 123.0
        engine.built.player.launch(_three_of_a_kind(engine, request.slot))()
        assert (cache.k_LSKD[:, free] == 123).all() and (cache.v_LSKD[:, free] == 123).all()
        dummy = engine.built.round.state.dummy
        assert int(engine.built.round.state.length_C[dummy]) == 0


def _three_of_a_kind(engine: Any, slot: int) -> Batch:
    """A batch of one in a bucket of four: the recording of a batch of three serves it."""
    dummy = engine.built.round.state.dummy
    return Batch(
        slot_B=torch.tensor([slot, dummy, dummy]),
        allowance_B=torch.tensor([16, 1, 1]),
        rows=16,
        columns=80,
        needs=Needs(),
        levels=max(engine.built.round.drafter.depths, default=0),
    )


def test_kinds_are_rounded_up() -> None:
    engine, _ = recorded("ngram", max_batch=6, max_context=4096, kv_tokens=8192)
    graphs = engine.built.player
    assert isinstance(graphs, Graphs)
    three, four = torch.tensor([1, 2, 3]), torch.tensor([4, 4, 4])
    batch = Batch(three, four, 4, 600, Needs(top_k=40), levels=2)
    kind = graphs.kind_of(batch)
    assert (kind.requests, kind.rows, kind.columns, kind.needs.top_k) == (4, 4, 1024, 64)
    five = replace(batch, slot_B=torch.arange(5), needs=Needs(), columns=4100, levels=0)
    kind = graphs.kind_of(five)
    assert (kind.requests, kind.columns) == (6, 4096 + 15 + 2), "no bucket beyond what there is"
    assert kind.name == "6x4 columns=4113"
    assert graphs.kind_of(batch).name == "4x4 columns=1024 top_k=64 draft=2"


def test_what_cannot_be_recorded_is_launched_and_said() -> None:
    recorder = FakeRecorder(refuse=lambda number: number == 0)
    engine, _ = recorded("off", recorder=recorder, max_batch=2)
    prompts = [prompt_of(12, 1), prompt_of(20, 2)]
    with engine:
        one = engine.collect(engine.submit(prompts[0], GREEDY))
        outputs = finished(engine, [engine.submit(p, GREEDY) for p in prompts])
        told = backend_json(engine.built)["graphs"]
    assert list(one.token_ids) == judged(prompts[0], GREEDY)
    assert [list(o.token_ids) for o in outputs] == [judged(p, GREEDY) for p in prompts]
    reason = "RuntimeError: operation not permitted when stream is capturing"
    assert list(told["refused"].values()) == [reason]
    assert told["rounds_launched"] >= 20 and told["rounds_replayed"] >= 10


class _Cuda:
    """What a recorder uses of torch.cuda; as torch's own, a capture that fails stays on."""

    def __init__(self) -> None:
        self.on = "the caller's"
        self.captured: list[int] = []  # pools
        self.waited: list[Any] = []  # streams that the caller's waits for
        self._pools = count()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: next(self._pools))
        stream = SimpleNamespace(wait_stream=self.waited.append)
        patch.setattr(torch.cuda, "current_stream", lambda: stream)
        patch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_stream=id))
        patch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=None))
        patch.setattr(torch.cuda, "stream", self.stream)
        patch.setattr(torch.cuda, "graph", self.graph)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.on = self.on, "another"
        try:
            yield
        finally:
            self.on = before

    @contextmanager
    def graph(self, graph: Any, pool: int, stream: Any) -> Iterator[None]:
        before, self.on = self.on, "the capture's"
        self.captured.append(pool)
        yield
        self.on = before


def test_after_a_capture_that_fails_the_stream_is_the_callers_and_the_pool_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = _Cuda()
    cuda.install(monkeypatch)
    recorder = CudaRecorder()

    def step() -> torch.Tensor:
        if cuda.on == "the capture's" and len(cuda.captured) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(1)

    recorder.record(step)
    with pytest.raises(RuntimeError, match="capturing"):
        recorder.record(step)
    assert cuda.on == "the caller's"
    for _ in range(2):
        recorder.record(step)
    assert cuda.captured == [0, 0, 1, 1] and cuda.on == "the caller's"


def test_after_as_many_captures_as_may_fail_none_is_begun_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = _Cuda()
    cuda.install(monkeypatch)
    recorder = CudaRecorder()
    steps: list[str] = []

    def step() -> torch.Tensor:
        steps.append(cuda.on)
        if cuda.on == "the capture's":
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(1)

    for _ in range(MOST_BROKEN):
        with pytest.raises(RuntimeError, match="capturing"):
            recorder.record(step)
    assert cuda.captured == list(range(MOST_BROKEN))
    begun = len(steps)
    with pytest.raises(RuntimeError, match=f"{MOST_BROKEN} captures have failed"):
        recorder.record(step)
    assert len(steps) == begun and cuda.captured == list(range(MOST_BROKEN))


def test_what_a_first_play_that_fails_has_begun_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = _Cuda()
    cuda.install(monkeypatch)
    recorder = CudaRecorder()

    def step() -> torch.Tensor:
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        recorder.record(step)
    assert cuda.waited == [recorder._aside] and cuda.captured == []


def test_a_kind_that_is_refused_refuses_no_other() -> None:
    recorder = FakeRecorder(refuse=lambda number: number == 0)
    engine, _ = recorded("off", recorder=recorder, max_batch=2)
    graphs = engine.built.player
    one = Batch(torch.tensor([0]), torch.tensor([1]), 1, 8, Needs(top_k=3), levels=0)
    others = [replace(one, needs=Needs(top_k=9)), replace(one, raw_top=0), replace(one, raw_top=2)]
    for batch in (one, one, *others):
        graphs.launch(batch)()
    played = graphs.played
    head = "1x1 columns=512 top_k="
    assert list(played.refused) == [f"{head}4"] and played.eager == 2
    assert played.recorded == [f"{head}16", f"{head}4 raw=0", f"{head}4 raw=2"]


def test_the_kind_that_was_not_played_for_longest_gives_way_to_a_new_one() -> None:
    engine, recorder = recorded("off", most=2, max_batch=2)
    graphs = engine.built.player
    one = Batch(torch.tensor([0]), torch.tensor([1]), 1, 8, Needs(), levels=0)
    first, second, third = (replace(one, needs=Needs(top_k=k)) for k in (1, 2, 4))
    for batch in (first, second, first, third, first, second):
        graphs.launch(batch)()
    told = graphs.played.as_json()
    names = ["1x1 columns=512 top_k=1", "1x1 columns=512 top_k=2"]
    assert told["recorded"] == names and told["given_up"] == 2
    assert told["refused"] == {} and told["rounds_launched"] == 0
    assert recorder.repeats == [0, 1, 0, 2, 0, 3] and graphs.played.recordings == 4


def test_no_recording_gives_way_to_a_kind_that_cannot_be_recorded() -> None:
    recorder = FakeRecorder(refuse=lambda number: number == 1)
    engine, _ = recorded("off", recorder=recorder, most=1, max_batch=2)
    graphs = engine.built.player
    one = Batch(torch.tensor([0]), torch.tensor([1]), 1, 8, Needs(), levels=0)
    for batch in (one, replace(one, needs=Needs(top_k=2)), one):
        graphs.launch(batch)()
    played = graphs.played
    assert played.recorded == ["1x1 columns=512"] and played.given_up == 0
    assert list(played.refused) == ["1x1 columns=512 top_k=2"]
    assert recorder.repeats == [0, 0] and recorder.count == 2


def test_an_outcome_that_nobody_reads_keeps_no_recording_from_giving_way() -> None:
    engine, _ = recorded("off", recorder=FakeRecorder(late=True), most=1, max_batch=2)
    graphs = engine.built.player
    one = Batch(torch.tensor([0]), torch.tensor([1]), 1, 8, Needs(), levels=0)
    graphs.launch(one)
    graphs.launch(replace(one, needs=Needs(top_k=2)))()
    played = graphs.played
    assert played.recorded == ["1x1 columns=512 top_k=2"] and played.given_up == 1
    assert played.eager == 0


class _Failing(FakeRecorder):
    """Once, when it is told to, one of its calls fails."""

    fails = ""

    def _may_fail(self, name: str) -> None:
        if self.fails == name:
            self.fails = ""
            raise MemoryError("planted")

    def record(self, step: Any) -> Any:
        repeat, block = super().record(step)

        def repeats() -> None:
            self._may_fail("repeat")
            repeat()

        return repeats, block

    def staging(self, like: torch.Tensor) -> torch.Tensor:
        self._may_fail("staging")
        return super().staging(like)

    def send(self, device: torch.Tensor, staged: torch.Tensor) -> None:
        self._may_fail("send")
        super().send(device, staged)

    def fetch(self, staged: torch.Tensor, device: torch.Tensor) -> Any:
        self._may_fail("fetch")
        return super().fetch(staged, device)


CALLS = ["staging", "send", "repeat", "fetch"]


@pytest.mark.parametrize("call", CALLS)
def test_a_launch_that_fails_loses_no_recording_and_keeps_none_from_giving_way(call: str) -> None:
    recorder = _Failing()
    engine, _ = recorded("off", recorder=recorder, most=1, max_batch=2)
    graphs, played = engine.built.player, engine.built.player.played
    one = Batch(torch.tensor([0]), torch.tensor([1]), 1, 8, Needs(), levels=0)
    recorder.fails = call
    with pytest.raises(MemoryError, match="planted"):
        graphs.launch(one)
    assert played.replayed == len(recorder.repeats)
    graphs.launch(one)()
    assert recorder.count == 1 and played.recorded == ["1x1 columns=512"]
    graphs.launch(replace(one, needs=Needs(top_k=2)))()
    assert played.recorded == ["1x1 columns=512 top_k=2"]
    assert played.given_up == 1 and played.eager == 0


@pytest.mark.parametrize("call", CALLS)
def test_after_a_launch_that_fails_the_engine_goes_on_replaying_and_recording(call: str) -> None:
    recorder = _Failing()
    engine, _ = recorded("ngram", recorder=recorder, most=1, max_batch=2)
    prompts, played = [prompt_of(12, 1), prompt_of(20, 2)], engine.built.player.played
    with engine:
        failed = engine.submit(prompts[0], GREEDY)
        for _ in range(3):
            engine.step()
        recorder.fails = call
        graphs = engine.built.player
        assert isinstance(graphs, Graphs)
        for one in graphs._recordings.values():
            one.spare.clear()  # so that memory is asked for
        with pytest.raises(MemoryError, match="planted"):
            engine.collect(failed)
        known = recorder.count
        again = engine.collect(engine.submit(prompts[0], GREEDY))
        assert recorder.count == known
        outputs = finished(engine, [engine.submit(p, GREEDY) for p in prompts])
        assert free_pages(engine) == engine.built.scheduler.book.pool.count
    want = [judged(p, GREEDY) for p in prompts]
    assert [list(o.token_ids) for o in (again, *outputs)] == [want[0], *want]
    assert recorder.count > known and played.eager == 0 and played.refused == {}


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_answers_do_not_change_where_recordings_give_way(most: int, late: bool) -> None:
    """With one recording at once it gives way while its round is in flight."""
    asked = asks(8, seed=3)
    want = [judged(prompt, params) for prompt, params in asked]
    recorder = FakeRecorder(late=late)
    engine, _ = recorded("ngram", recorder=recorder, most=most, max_batch=5, prefill_chunk=9)
    with engine:
        assert arriving_at_random(engine, asked, seed=3) == want
        assert engine.built.player.played.given_up > 0


def test_an_engine_on_a_cpu_says_that_it_launches_torch() -> None:
    with tiny_engine("ngram") as engine:
        told = backend_json(engine.built)
    assert told == {
        "kernels": "torch",
        "kernels_why": None,
        "draft_kernels": None,
        "draft_kernels_why": None,
        "put_kernels_why": None,
        "join_kernels_why": None,
        "batch_invariant": False,
        "memory": None,
        "rounds_ahead": 0,
        "graphs": None,
    }


def test_warming_up_records_the_common_kinds_first() -> None:
    engine, _ = recorded("ngram", draft={"adaptive": True}, max_batch=2)
    with engine:
        engine.warm_up(GREEDY)
        names = engine.built.player.played.recorded
        assert [name.split()[0] for name in names] == ["1x1", "1x1", "1x2", "1x4", "1x8", "1x16"]
        assert [name.endswith("draft=4") for name in names] == [False] + [True] * 5
    engine, _ = recorded("off", max_batch=2)
    with engine:
        engine.warm_up(GREEDY)
        assert [n.split()[0] for n in engine.built.player.played.recorded] == ["1x1"]


def random_outcome(seed: int, batch: int, dtype: torch.dtype) -> Emitted:
    rng = random.Random(seed)
    torch.manual_seed(seed)

    def ints(*size: int) -> torch.Tensor:
        return torch.randint(-5, 1 << 40, size)

    def told() -> Logprobs | None:
        if rng.random() < 0.4:
            return None
        top = rng.randint(0, 3)
        chosen, likeliest = torch.randn(batch, 3).to(dtype), torch.randn(batch, 3, top)
        return Logprobs(chosen, ints(batch, 3, top), likeliest)

    counts = (ints(batch) for _ in range(4))
    flags = (torch.rand(batch) < 0.5 for _ in range(3))
    tensors = (ints(batch, 3), *counts, *flags, torch.rand(batch, rng.choice([0, 7])))
    return Emitted(*tensors, raw=told(), processed=told())


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_outcome_survives_its_journey_in_one_block(batch: int, dtype: torch.dtype) -> None:
    for seed in range(20):
        outcome = random_outcome(seed, batch, dtype)
        block = packed(outcome)
        assert block.dtype == torch.uint8
        _same(unpacked(block.clone(), outcome), outcome)


def _same(one: Any, other: Any) -> None:
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and torch.equal(a, b)
        elif a is None:
            assert b is None
        else:
            _same(a, b)


def test_the_check_can_fail() -> None:
    outcome = random_outcome(0, 3, torch.float32)
    block = packed(outcome)
    block[0] ^= 1
    with pytest.raises(AssertionError):
        _same(unpacked(block, outcome), outcome)


class _Deaf(FakeRecorder):
    """Replays nothing: results stay those of the recording, in which nobody played."""

    def record(self, step: Any) -> Any:
        _, block = super().record(step)
        return lambda: None, block


def test_a_recorder_that_does_not_replay_is_found_out() -> None:
    engine, _ = recorded("off", recorder=_Deaf(), max_batch=2)
    prompt = prompt_of(12, 1)
    request = engine.submit(prompt, GREEDY)
    for _ in range(30):
        engine.step()
    output = engine.abort(request)
    assert output is not None
    assert list(output.token_ids) != judged(prompt, GREEDY)
