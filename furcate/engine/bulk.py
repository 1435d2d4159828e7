"""Plain decoding of very many sequences at once: how the target writes training data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from furcate.engine.bulk_rows import Look, Rows
from furcate.engine.bulk_script import Limits, Script, Span, Stage, Tape, Written, check_token
from furcate.errors import BadRequest, RequestFailed
from furcate.models.decoder import Decoder

__all__ = ["Progress", "Script", "Span", "Stage", "Written", "write"]

LOOK_EVERY = 16  # steps between two looks: a row that ends in between waits


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come. Tokens are those of finished and unfinished sequences, fed or
    sampled."""

    scripts: int  # finished
    tokens: int
    steps: int


def write(
    decoder: Decoder,
    scripts: Iterable[Script],
    *,
    stop_ids: Sequence[int],
    batch: int,
    context: int,
    on_progress: Callable[[Progress], None] | None = None,
) -> Iterator[Written]:
    """Write out scripts, `batch` of them at a time, and yield them in their order.

    A sampled token is the one that the engine would choose after the tokens before it, at the
    script's seed and the stage's temperature; so a sequence depends on its script alone, and not
    on its company (on a GPU up to rounding). A row that ends is given the next script. A sequence
    of `context` tokens ends there.

    Args:
        decoder: the model; on a GPU a step of all rows is one CUDA graph.
        scripts: what to write; taken as rows get free.
        stop_ids: end a stage. The first one closes a stage that ended without.
        batch: rows, sequences in the making.
        context: most tokens of a sequence, at least 2.
        on_progress: called after every 16 steps.

    Raises:
        BadRequest: an option or a script is out of range, or the device has too little memory.
        Unsupported: the GPU's kernels do not know this model's shape.
        RequestFailed: the model's logits were not finite.
    """
    limits = Limits(decoder.spec.vocab_size, context, tuple(stop_ids))
    _check(limits, batch, decoder.spec.max_position)
    return _Desk(Rows(decoder, batch, limits), batch, scripts, limits).work(on_progress)


def _check(limits: Limits, batch: int, trained: int) -> None:
    if not limits.stop_ids:
        raise BadRequest("name at least one", field="stop_ids")
    for token in limits.stop_ids:
        check_token(token, limits.vocab, "stop_ids")
    if batch < 1:
        raise BadRequest("must be at least 1", field="batch", value=batch)
    if not 2 <= limits.context <= trained:
        what = f"must be 2 to {trained}, the length the model was trained for"
        raise BadRequest(what, field="context", value=limits.context)


@dataclass(frozen=True, slots=True)
class _Job:
    number: int  # of the script
    tape: Tape


class _Desk:
    """Hands scripts to free rows, and finished sequences back in the scripts' order."""

    def __init__(self, rows: Rows, batch: int, scripts: Iterable[Script], limits: Limits) -> None:
        self._rows = rows
        self._jobs = (_Job(i, Tape.of(script, limits)) for i, script in enumerate(scripts))
        self._next: deque[_Job] = deque()  # made ready while the device is at work
        self._free = list(range(batch))
        self._played: dict[int, _Job] = {}  # by row
        self._finished: dict[int, Written] = {}  # by number of the script, until it is its turn
        self._handed = 0
        self._tokens = 0  # of finished sequences

    def work(self, on_progress: Callable[[Progress], None] | None) -> Iterator[Written]:
        steps = 0
        self._refill()
        while self._played:
            self._rows.run(LOOK_EVERY)
            steps += LOOK_EVERY
            # the caller deals with what it gets, and makes more scripts, while the device works
            yield from self._in_order()
            self._stock(len(self._played) // 8)
            look = self._rows.look()
            self._collect(look)
            if on_progress is not None:
                on_progress(self._progress(look, steps))
            self._refill()
        yield from self._in_order()

    def _stock(self, amount: int) -> None:
        while len(self._next) < amount and (job := next(self._jobs, None)) is not None:
            self._next.append(job)

    def _refill(self) -> None:
        self._stock(len(self._free))
        count = min(len(self._free), len(self._next))
        if count == 0:
            return
        rows = [self._free.pop() for _ in range(count)]
        jobs = [self._next.popleft() for _ in range(count)]
        self._rows.load(rows, [job.tape for job in jobs])
        self._played.update(zip(rows, jobs, strict=True))

    def _collect(self, look: Look) -> None:
        rows = [row for row in self._played if look.idle_B[row]]
        for row in rows:
            if look.broken_B[row]:
                what = "the model's logits were not finite"
                raise RequestFailed(what, field="script", value=self._played[row].number)
        if not rows:
            return
        token_NS, from_NS = self._rows.read(rows)
        for n, row in enumerate(rows):
            job, length = self._played.pop(row), int(look.length_B[row])
            written = job.tape.written(token_NS[n, :length], from_NS[n, :length])
            self._finished[job.number] = written
            self._tokens += length
        self._free += rows

    def _in_order(self) -> Iterator[Written]:
        while self._handed in self._finished:
            yield self._finished.pop(self._handed)
            self._handed += 1

    def _progress(self, look: Look, steps: int) -> Progress:
        running = int(sum(look.length_B[row] for row in self._played))
        done = self._handed + len(self._finished)
        return Progress(done, self._tokens + running, steps)
