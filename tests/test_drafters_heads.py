"""Heads as drafters: no token changes, and what is kept is what a teacher would have kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drafter_views import paths_of
from tiny_engine import VOCAB, Script, finished, free_pages, judged, prompt_of, tiny_engine
from tiny_heads import KINDS, RECURRENT, Knowing, around, beside, forced, network, unrolled

from furcate.config import SamplingParams
from furcate.drafters.adversary import Adversary
from furcate.drafters.base import View
from furcate.drafters.plausible import PRIOR, log_weights
from furcate.drafters.recurrent import RecurrentDrafter
from furcate.engine.budget import Patience
from furcate.engine.engine import Engine
from furcate.engine.request import Request
from furcate.kernels.draft import Proposal
from furcate.kernels.grow import HIGHEST
from furcate.verify.noise import gumbel_noise

RANKS = [[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 0]]
TOLERANCE = 1e-10  # float64, and states of size 1


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 30, "seed": 3, "ignore_eos": True, **more})


def gap(drafter: RecurrentDrafter, request: Request, page_size: int) -> float:
    """Largest difference between what the drafter keeps of a request and what it should.

    States of all that is cached, keys of what the drafter was shown; position 0 has no keys.
    """
    want = forced(drafter.network, request.tokens[: request.cached + 1])
    at_T = torch.arange(request.cached)
    pages_T = torch.tensor(request.pages.numbers)[at_T // page_size]
    slot_T = pages_T * page_size + at_T % page_size
    read_T = slot_T[1 : request.read]
    keys, state_SC = drafter.cache.keys, drafter.cache.states.state_SC
    gaps = [
        state_SC[slot_T] - want.state_TC[:-1],
        keys.k_LSKD[:, read_T] - want.k_LTKD[:, : len(read_T)],
        keys.v_LSKD[:, read_T] - want.v_LTKD[:, : len(read_T)],
    ]
    return max(float(g.abs().max()) for g in gaps if g.numel())


def worst_gap(engine: Engine, drafter: RecurrentDrafter) -> float:
    """Over everybody whose prompt is scored."""
    scheduler = engine.built.scheduler
    size = scheduler.book.page_size
    return max((gap(drafter, r, size) for r in scheduler.decoding()), default=0.0)


def run_and_check(engine: Engine, drafter: RecurrentDrafter, names: Sequence[str]) -> list[Any]:
    while engine.step():
        assert worst_gap(engine, drafter) < TOLERANCE
    return finished(engine, names)


@pytest.mark.parametrize("small_vocab", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_changes_no_token_and_keeps_what_a_teacher_would(
    kind: str, small_vocab: bool, temperature: float
) -> None:
    drafter = around(network(kind, small_vocab), max_batch=3)
    asked = [(prompt_of(n, n), params(seed=n, temperature=temperature)) for n in (1, 2, 17, 40)]
    with tiny_engine(drafter, max_batch=3, prefill_chunk=16) as engine:
        before = engine.built.scheduler.book.pool.free
        outputs = run_and_check(engine, drafter, [engine.submit(*ask) for ask in asked])
        assert free_pages(engine) == before
    assert [list(o.token_ids) for o in outputs] == [judged(*ask) for ask in asked]
    assert sum(o.stats.drafted for o in outputs) > 0


def test_the_cache_check_notices_a_state_of_the_position_before() -> None:
    drafter = around(network("eagle3"), max_batch=1)
    with tiny_engine(drafter, max_batch=1) as engine:
        engine.submit(prompt_of(20), params())
        engine.step()
        assert worst_gap(engine, drafter) < TOLERANCE
        state_SC = drafter.cache.states.state_SC
        state_SC.copy_(state_SC.roll(1, 0))
        assert worst_gap(engine, drafter) > 1e-3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tree", ["hybrid", "dynamic", RANKS], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_streams_are_those_of_plain_decoding_whatever_the_tree(
    kind: str, tree: Any, batch: int, temperature: float
) -> None:
    shape = {"tree": tree, "depth": None, "topk": None} if isinstance(tree, list) else {}
    make = beside if tree == "hybrid" else around
    drafter = make(network(kind), shape, max_batch=batch)
    asked = [(prompt_of(n, n), params(seed=n, temperature=temperature)) for n in (1, 18, 33)]
    with tiny_engine(drafter, max_batch=batch, prefill_chunk=16) as engine:
        outputs = finished(engine, [engine.submit(*ask) for ask in asked])
    assert [list(o.token_ids) for o in outputs] == [judged(*ask) for ask in asked]
    assert sum(o.stats.drafted for o in outputs) > 0


@pytest.mark.parametrize("words", [None, range(1, VOCAB)], ids=["whole", "reduced"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_a_head_that_knows_the_target_is_always_right(
    temperature: float, words: range | None
) -> None:
    """Positions, states, tokens and noise are all where they belong."""
    stream = prompt_of(200, seed=7)
    script = Script(stream)
    asked = params(temperature=temperature, max_tokens=50, allowed_token_ids=tuple(range(1, VOCAB)))
    drafter = around(Knowing(script, words), {"topk": 1, "beta": 1.0}, max_batch=3)
    with tiny_engine(drafter, target=script, max_batch=3, prefill_chunk=7) as engine:
        names = [engine.submit(stream[:n], asked) for n in (2, 23, 40)]
        outputs = finished(engine, names)
    for output in outputs:
        assert output.stats.rounds == 10, "five tokens a round"
        assert output.stats.accepted_by_depth == output.stats.offered_by_depth
    if temperature == 0:
        assert [list(o.token_ids) for o in outputs] == [stream[n : n + 50] for n in (2, 23, 40)]


def test_the_knowing_head_is_wrong_where_its_noise_is_anothers() -> None:
    script = Script(prompt_of(200, seed=7))
    drafter = around(Knowing(script), {"topk": 1, "beta": 1.0}, max_batch=1)
    real = drafter._grower.reader.words.noise
    drafter._grower.reader.words.noise = lambda view, levels: real(view, levels + 1)[:, 1:]
    with tiny_engine(drafter, target=script, max_batch=1) as engine:
        output = engine.collect(engine.submit([5, 6, 7], params(temperature=3.0, max_tokens=50)))
    assert output.stats.rounds > 20


def expected_value(
    head: Any, text: list[int], path: tuple[int, ...], asked: SamplingParams
) -> float:
    """log value of a path, from a teacher-forced pass over the text and an unrolled one below."""
    total, scale = 0.0, PRIOR.scale(1)
    temperature = torch.tensor([asked.temperature])
    words = list(range(VOCAB)) if head.token_D is None else head.token_D.tolist()
    for d, logits_D in enumerate(unrolled(head, text, path[:-1])):
        at = torch.tensor([[len(text) + d]])
        noise_BV = gumbel_noise(torch.tensor([asked.seed]), at, torch.tensor([0]), VOCAB)[:, 0]
        noise_BD = noise_BV[:, words] if asked.temperature else None
        weight_D = log_weights(logits_D[None, None], temperature, noise_BD, scale)[0, 0]
        total += min(float(weight_D[words.index(path[d])]), math.log(HIGHEST))
    return total


@pytest.mark.parametrize("small_vocab", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", RECURRENT)
def test_every_node_is_worth_what_an_unrolled_head_says(
    kind: str, temperature: float, small_vocab: bool
) -> None:
    head = network(kind, small_vocab)
    drafter, asked = around(head, {"topk": 3}, max_batch=2), params(temperature=temperature)
    proposals: list[tuple[list[int], Proposal]] = []
    real = drafter.propose

    def propose(view: View, levels: int) -> Proposal:
        text = view.tokens_BW[-1, : int(view.length_B[-1]) + 1].tolist()
        proposals.append((text, made := real(view, levels)))
        return made

    drafter.propose = propose
    drafter.plausible.trust.update = lambda tags, judged: None  # so that weights stay as they are
    with tiny_engine(drafter, max_batch=2) as engine:
        finished(engine, [engine.submit(prompt_of(n), asked) for n in (30, 21)])
    for text, proposal in proposals[2:8:3]:
        found = paths_of(proposal, len(proposal.tokens_BP) - 1)
        assert len(found) == drafter.pool
        want = {path: expected_value(head, text, path, asked) for path in found}
        assert found == pytest.approx(want, abs=2e-4)


def led(kind: str, streams: Sequence[Sequence[int]], **options: Any) -> RecurrentDrafter:
    """A random head whose trees are another's, who knows the streams: long paths are accepted."""
    drafter = around(network(kind), **options)
    leader = Adversary(streams, "any", vocab=VOCAB, depth=drafter.depth)
    real = drafter.propose
    drafter.pool = leader.pool
    drafter.propose = lambda view, levels: (real(view, levels), leader.propose(view, levels))[1]
    return drafter


def streams_of(asked: Sequence[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    return [[*prompt, *judged(prompt, p)] for prompt, p in asked]


@pytest.mark.parametrize("chunk", [7, 64, 256])
@pytest.mark.parametrize("kind", RECURRENT)
def test_neither_accepted_paths_nor_chunks_of_a_prompt_change_what_is_kept(
    kind: str, chunk: int
) -> None:
    asked = [(prompt_of(n, n), params(seed=n, temperature=n % 2)) for n in (2, 33, 70, 90)]
    streams = streams_of(asked)
    with tiny_engine(
        drafter := led(kind, streams, max_batch=3), max_batch=3, prefill_chunk=chunk
    ) as engine:
        outputs = run_and_check(engine, drafter, [engine.submit(*ask) for ask in asked])
    assert [[*a[0], *o.token_ids] for a, o in zip(asked, outputs, strict=True)] == streams
    assert sum(o.stats.accepted for o in outputs) > 40


@pytest.mark.parametrize("kind", RECURRENT)
def test_what_is_kept_survives_fights_for_pages(kind: str) -> None:
    asked = [(prompt_of(5 * n + 2, n), params(seed=n, max_tokens=60 - 3 * n)) for n in range(8)]
    streams = streams_of(asked)
    room = {"max_batch": 5, "kv_tokens": 96}
    with tiny_engine(drafter := led(kind, streams, **room), prefill_chunk=9, **room) as engine:
        outputs = run_and_check(engine, drafter, [engine.submit(*ask) for ask in asked])
        assert free_pages(engine) == 6
    assert [[*a[0], *o.token_ids] for a, o in zip(asked, outputs, strict=True)] == streams
    assert sum(o.stats.preemptions for o in outputs) >= 4
    assert sum(o.stats.accepted for o in outputs) > 40


@pytest.mark.parametrize("kind", RECURRENT)
def test_what_is_kept_is_found_again_and_shared(kind: str) -> None:
    first, p = prompt_of(37), params(temperature=1.0, n=3)
    streams = [[*first, *judged(first, p)]]
    with tiny_engine(drafter := led(kind, streams, max_batch=4), max_batch=4) as engine:
        one = run_and_check(engine, drafter, [engine.submit(first, p)])[0]
        second = [*first, *one.token_ids, *prompt_of(9, seed=2)]
        again = [engine.submit(first, p), engine.submit(second, p), engine.submit(first[:30], p)]
        outputs = run_and_check(engine, drafter, again)
    assert [c.stats.reused_tokens for c in one.choices] == [0, 36, 36]
    assert outputs[1].stats.reused_tokens >= 36 + 29
    assert list(outputs[1].token_ids) == judged(second, p)


class Spells(Patience):
    """Rests fifteen rounds, is asked in five, and so on."""

    def asks(self) -> bool:
        self.vain += 1
        return self.vain % 20 > 14

    def note(self, paid: bool) -> bool:
        """Whatever comes of it."""
        return False


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_head_that_rested_catches_up_from_what_was_kept(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [(prompt_of(n, n), params(seed=n, max_tokens=70)) for n in (8, 30)]
    streams = streams_of(asked)
    drafter = led(kind, streams, max_batch=2)
    with tiny_engine(drafter, max_batch=2, draft={"adaptive": True}) as engine:
        loop, size = engine._loop, engine.built.scheduler.book.page_size
        monkeypatch.setattr(loop.budget, "rows", lambda needs, gains: 8 if any(gains[0]) else 1)
        monkeypatch.setattr(loop, "patience", Spells())
        names = [engine.submit(*ask) for ask in asked]
        rested = 0
        while engine.step():
            players = engine.built.scheduler.decoding()
            rested = max([rested, *(r.cached - r.read for r in players)])
            assert all(gap(drafter, r, size) < TOLERANCE for r in players)
        outputs = finished(engine, names)
    assert rested >= 15
    assert [[*a[0], *o.token_ids] for a, o in zip(asked, outputs, strict=True)] == streams
    assert sum(o.stats.accepted for o in outputs) > 10


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_head_goes_on_past_the_context_it_was_trained_for(kind: str) -> None:
    drafter = around(network(kind, max_position=16), max_batch=1)
    prompt, p = prompt_of(60), params(max_tokens=40)
    with tiny_engine(drafter, max_batch=1) as engine:
        (output,) = run_and_check(engine, drafter, [engine.submit(prompt, p)])
    assert list(output.token_ids) == judged(prompt, p)
