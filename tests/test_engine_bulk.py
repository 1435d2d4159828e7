"""Bulk writing: every stage is what plain decoding says, whatever is written beside it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from small_models import tiny_decoder

from furcate.config import SamplingParams
from furcate.engine.bulk import Progress, Script, Span, Stage, Written, write
from furcate.engine.bulk_rows import check_room
from furcate.engine.naive import naive
from furcate.errors import BadRequest, RequestFailed
from furcate.kv.cache import CacheShape
from furcate.models.decoder import Decoder

VOCAB = 24  # small, so that stop ids come up often
STOPS = (2, 5)
CONTEXT = 80  # more than a page


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=str)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return tiny_decoder(request.param, 1, VOCAB)


def random_script(seed: int) -> Script:
    rng = random.Random(seed)

    def stage(least: int) -> Stage:
        feed = tuple(rng.choices(range(VOCAB), k=rng.randint(least, 6)))
        return Stage(feed, rng.choice([0.0, 0.7, 1.0, 1.5]), rng.choice([1, 2, 9, 30]))

    stages = [stage(1), *(stage(0) for _ in range(rng.randint(0, 3)))]
    return Script(tuple(stages), rng.getrandbits(64))


def run(decoder: Decoder, scripts: Iterable[Script], **changes: Any) -> list[Written]:
    asked: dict[str, Any] = {"stop_ids": STOPS, "batch": 3, "context": CONTEXT, **changes}
    return list(write(decoder, scripts, **asked))


def judged(decoder: Decoder, script: Script, context: int = CONTEXT) -> Written:
    """The script played by the slow loop, stage after stage."""
    tokens: list[int] = []
    spans: list[Span] = []
    for number, stage in enumerate(script.stages):
        if number and tokens[-1] not in STOPS:
            tokens.append(STOPS[0])
        tokens = [*tokens, *stage.feed][:context]
        room = context - len(tokens)
        if room == 0:
            break
        params = SamplingParams(
            temperature=stage.temperature, seed=script.seed, max_tokens=min(room, stage.most)
        )
        said = naive(decoder, tokens, params, STOPS)
        spans.append(Span(len(tokens), len(tokens) + len(said), number))
        tokens += said
        if len(tokens) == context:
            break
    return Written(tokens, tuple(spans))


def test_every_sequence_is_what_plain_decoding_says(decoder: Decoder) -> None:
    scripts = [random_script(seed) for seed in range(14)]
    assert run(decoder, scripts) == [judged(decoder, script) for script in scripts]


def test_the_judged_sequences_end_in_every_way() -> None:
    """Stages end by a stop id and by `most`, sequences by their script and by the context."""
    decoder = tiny_decoder(torch.float64, 1, VOCAB)
    scripts = [random_script(seed) for seed in range(14)]
    stopped, cut, full = 0, 0, 0
    for script in scripts:
        written = judged(decoder, script, 32)
        full += len(written.tokens) == 32
        for span in written.spans:
            by_stop = written.tokens[span.end - 1] in STOPS
            stopped += by_stop
            cut += not by_stop and span.end - span.start == script.stages[span.stage].most
    assert min(stopped, cut, full) >= 3
    assert run(decoder, scripts, context=32) == [judged(decoder, s, 32) for s in scripts]


@pytest.mark.parametrize("batch", [1, 2, 40])
def test_company_and_order_change_nothing(batch: int) -> None:
    decoder = tiny_decoder(torch.float64, 1, VOCAB)
    scripts = [random_script(seed) for seed in range(12)]
    expected = run(decoder, scripts)
    order = random.Random(batch).sample(range(12), 12)
    shuffled = run(decoder, [scripts[i] for i in order], batch=batch)
    assert shuffled == [expected[i] for i in order]


def test_another_seed_says_something_else() -> None:
    decoder = tiny_decoder(torch.float64, 1, VOCAB)
    stages = (Stage((3, 4), 1.0, 30),)
    first, second = run(decoder, [Script(stages, 1), Script(stages, 2)])
    assert first.tokens != second.tokens
    again, greedy = run(decoder, [Script(stages, 1), Script((Stage((3, 4), 0.0, 30),), 1)])
    assert again == first
    assert greedy.tokens != first.tokens


def silent(decoder: Decoder, script: Script) -> Written:
    """Without stop ids that the model could say: all stages run to their `most`."""
    (written,) = run(decoder, [script], stop_ids=[VOCAB - 1])
    assert all(VOCAB - 1 not in written.tokens[s.start : s.end] for s in written.spans)
    return written


def test_a_stage_that_did_not_stop_is_closed_before_the_next() -> None:
    decoder = tiny_decoder(torch.float64, 3, VOCAB)
    with torch.no_grad():  # the last token is never said
        assert decoder.head is not None
        decoder.head.weight[VOCAB - 1] = 0
    two = Script((Stage((1, 7), 0.0, 3), Stage((8,), 0.0, 2)), 0)
    written = silent(decoder, two)
    assert written.spans == (Span(2, 5, 0), Span(7, 9, 1))
    assert written.tokens[5:7] == [VOCAB - 1, 8]
    assert len(written.tokens) == 9, "the last stage is left open"


def test_a_stage_that_stopped_is_not_closed_twice() -> None:
    decoder = tiny_decoder(torch.float64, 1, VOCAB)
    everything = tuple(range(VOCAB))
    stages = (Stage((1, 7), 1.0, 9), Stage((8,), 1.0, 9), Stage((), 1.0, 9))
    (written,) = run(decoder, [Script(stages, 0)], stop_ids=everything)
    assert written.spans == (Span(2, 3, 0), Span(4, 5, 1), Span(5, 6, 2))
    assert len(written.tokens) == 6


@pytest.mark.parametrize("feed", [31, 32, 50, 200])
def test_what_is_fed_may_fill_the_context(feed: int) -> None:
    decoder = tiny_decoder(torch.float64, 1, VOCAB)
    script = Script((Stage(tuple(i % 20 + 3 for i in range(feed)), 1.0, 9),), 7)
    (written,) = run(decoder, [script], context=32)
    assert written == judged(decoder, script, 32)
    assert len(written.tokens) == 32


def test_scripts_are_taken_as_rows_get_free() -> None:
    """A run of unknown length starts at once, and takes no more scripts than it has use for."""
    decoder = tiny_decoder(torch.float32, 1, VOCAB)
    taken: list[int] = []

    def endless() -> Iterator[Script]:
        for seed in range(10**9):
            taken.append(seed)
            yield Script((Stage((1,), 1.0, 4),), seed)

    lines = write(decoder, endless(), stop_ids=STOPS, batch=2, context=16)
    for _ in range(9):
        next(lines)
    assert 9 <= len(taken) <= 14


def test_progress_counts_scripts_and_tokens() -> None:
    decoder = tiny_decoder(torch.float32, 1, VOCAB)
    told: list[Progress] = []
    written = run(decoder, [random_script(i) for i in range(9)], on_progress=told.append)
    assert told == sorted(told, key=lambda p: (p.scripts, p.tokens, p.steps))
    assert told[-1].scripts == 9
    assert told[-1].tokens == sum(len(w.tokens) for w in written)
    assert told[0].tokens > 0


def test_nothing_to_write_is_nothing() -> None:
    assert run(tiny_decoder(torch.float32, 1, VOCAB), []) == []


def test_logits_that_are_not_finite_name_the_script() -> None:
    decoder = tiny_decoder(torch.float32, 1, VOCAB)
    with torch.no_grad():
        decoder.embedding[9] = torch.nan
    scripts = [Script((Stage((token,), 0.0, 1),), 0) for token in (3, 4, 9)]
    with pytest.raises(RequestFailed, match=r"script: .*not finite.*got 2"):
        run(decoder, scripts)


GOOD = Script((Stage((1,), 1.0, 4),), 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stop_ids": []}, "stop_ids: name at least one"),
        ({"stop_ids": [VOCAB]}, "stop_ids: token ids are 0 to 23"),
        ({"batch": 0}, "batch: must be at least 1"),
        ({"context": 1}, "context: must be 2 to 4096"),
        ({"context": 5000}, "context: must be 2 to 4096"),
    ],
    ids=str,
)
def test_bad_options_are_refused_before_anything_is_written(
    changes: dict[str, Any], said: str
) -> None:
    asked: dict[str, Any] = {"stop_ids": STOPS, "batch": 3, "context": CONTEXT, **changes}
    with pytest.raises(BadRequest, match=said):
        write(tiny_decoder(torch.float32, 1, VOCAB), [GOOD], **asked)


@pytest.mark.parametrize(
    ("stages", "seed", "said"),
    [
        ((), 0, "script: the first stage must feed a token"),
        ((Stage((), 1.0, 4),), 0, "script: the first stage must feed a token"),
        ((Stage((1,), 1.0, 0),), 0, "stage.most: must be at least 1"),
        ((Stage((1,), -0.5, 4),), 0, "stage.temperature: must be 0 or more"),
        ((Stage((1,), float("nan"), 4),), 0, "stage.temperature: must be 0 or more"),
        ((Stage((1, -1), 1.0, 4),), 0, "stage.feed: token ids are 0 to 23"),
        ((Stage((1,), 1.0, 4),), 1 << 64, "script.seed: must be 0 to"),
    ],
    ids=str,
)
def test_scripts_that_cannot_be_played_are_refused(
    stages: Sequence[Stage], seed: int, said: str
) -> None:
    with pytest.raises(BadRequest, match=said):
        run(tiny_decoder(torch.float32, 1, VOCAB), [Script(tuple(stages), seed)])


def test_too_little_memory_names_batch_and_context() -> None:
    shape = CacheShape(layers=30, kv_heads=3, head_dim=64, pages=1024 * 20, page_size=64)
    need = shape.bytes(torch.bfloat16)
    check_room(shape, torch.bfloat16, 1024, need)
    with pytest.raises(BadRequest, match=r"1024 rows of 1280 tokens need 28.1 GiB.*lower batch"):
        check_room(shape, torch.bfloat16, 1024, need - 1)
