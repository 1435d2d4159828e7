"""Rounds as CUDA graphs: one recording for each kind of round, replayed with other numbers.

Requests are rounded up to a bucket with rows of the dummy slot, which owns no page but the scratch
page. All that a round reads is in the state, which never moves; slots and allowances are copied
into the recording's own buffers. A round may be launched before the one ahead of it is read: on the
device one stream keeps the order, and every round in flight has memory of its own on the host.
Legend: B requests of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from furcate.engine.emitted import Emitted, packed, unpacked
from furcate.engine.player import Eager, Outcome, Played
from furcate.engine.round import Batch, Round
from furcate.verify.law import Needs

__all__ = ["MOST_BROKEN", "MOST_RECORDINGS", "CudaRecorder", "Graphs", "Kind", "Recorder"]

_LEAST_COLUMNS = 512
MOST_RECORDINGS = 256  # by requests, rows, columns, levels; at once, and one while it is made
MOST_BROKEN = 2  # captures that fail, each of which keeps a pool as large as the largest round
_WARM_UP = 2  # plays before a recording, in which kernels are compiled and workspaces made


class Recorder(Protocol):
    """Notes what a function does to the device, to do it again."""

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """(what repeats it, the tensor that holds its result after every repetition).

        Raises RuntimeError where that cannot be done.
        """
        ...

    def staging(self, like: Tensor) -> Tensor:
        """A tensor of this shape on the host, which the device can copy from and to by itself."""
        ...

    def send(self, device: Tensor, staged: Tensor) -> None:
        """Copy to the device behind all that was launched; `staged` may not change before that."""
        ...

    def fetch(self, staged: Tensor, device: Tensor) -> Callable[[], None]:
        """Copy to the host behind all that was launched; calling what it returns waits for that."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """Rounds that one recording serves."""

    requests: int
    rows: int
    columns: int
    needs: Needs
    levels: int
    raw_top: int | None
    processed_top: int | None

    @property
    def name(self) -> str:
        """As `--json` has it."""
        needs = {name: getattr(self.needs, name) for name in Needs.__dataclass_fields__}
        words = [f"{self.requests}x{self.rows}", f"columns={self.columns}"]
        words += [n if v is True else f"{n}={v}" for n, v in needs.items() if v]
        tops = {"raw": self.raw_top, "processed": self.processed_top}
        words += [f"{name}={top}" for name, top in tops.items() if top is not None]
        return " ".join(words + [f"draft={self.levels}"] * (self.levels > 0))


@dataclass(frozen=True, slots=True)
class Staging:
    """Memory on the host of one round in flight: nobody else's from its launch until it is read."""

    slots_2B: Tensor
    block: Tensor
    told: Emitted  # what lies in the block


@dataclass(slots=True, eq=False)
class Recording:
    """One kind of round, and the buffers through which it is told and tells."""

    slots_2B: Tensor  # int64, slots and allowances, on the device
    block: Tensor  # `packed`, on the device
    like: Emitted
    repeat: Callable[[], None]
    spare: list[Staging] = field(default_factory=list)  # as many as were ever in flight together


class Graphs:
    """Plays rounds from recordings, made when a kind of round is first asked for.

    A kind that cannot be recorded is launched kernel by kernel from then on, and `played` says why.
    What could not be launched either, a kernel too large for the device, is raised.
    Where there are as many recordings as may be, the one that was not played for longest gives way
    once that of a new kind is made. Whoever waits for a round keeps its recording until then.
    """

    records = True
    # With one round ahead a period is as long as the longer of the device's work and the host's; no
    # number of rounds makes it shorter, and each makes one more round in vain at an answer's end.
    ahead = 1

    def __init__(self, round_: Round, recorder: Recorder, most: int = MOST_RECORDINGS) -> None:
        self.played = Played()
        self._round = round_
        self._recorder = recorder
        self._eager = Eager(round_)
        self._most = most
        self._recordings: dict[Kind, Recording] = {}  # who was played last is last
        self._refused: set[Kind] = set()
        shape = round_.state.shape
        self._widest = shape.context + round_.most_nodes + 2

    def launch(self, batch: Batch) -> Outcome:
        """See `Player`."""
        kind = self.kind_of(batch)
        recording = self._recordings.get(kind) or self._recorded(kind)
        if recording is None:
            self.played.eager += 1
            return self._eager.launch(batch)
        self._recordings[kind] = self._recordings.pop(kind)
        # where something fails below this memory is dropped: the device may still write to it
        staging = self._staging(recording)
        self._tell(staging, batch)
        self._recorder.send(recording.slots_2B, staging.slots_2B)
        recording.repeat()
        self.played.replayed += 1
        wait = self._recorder.fetch(staging.block, recording.block)
        return partial(_outcome, recording, staging, wait)

    def kind_of(self, batch: Batch) -> Kind:
        """The smallest bucket that holds a round."""
        most, vocab = self._round.state.shape.capacity, self._round.state.shape.vocab
        top_k = min(_bucket(batch.needs.top_k), vocab) if batch.needs.top_k else 0
        return Kind(
            requests=min(_bucket(len(batch.slot_B)), max(most, len(batch.slot_B))),
            rows=batch.rows,
            columns=min(_bucket(max(batch.columns, _LEAST_COLUMNS)), self._widest),
            needs=replace(batch.needs, top_k=top_k),
            levels=batch.levels,
            raw_top=batch.raw_top,
            processed_top=batch.processed_top,
        )

    def _recorded(self, kind: Kind) -> Recording | None:
        """Record a kind of round, or note why that cannot be done."""
        if kind in self._refused:
            return None
        try:
            recording = self._record(kind)
        except RuntimeError as fault:
            self._refused.add(kind)
            self.played.refused[kind.name] = f"{type(fault).__name__}: {fault}".splitlines()[0]
            return None
        if len(self._recordings) >= self._most:
            self._give_up()
        self._recordings[kind] = recording
        self.played.recorded.append(kind.name)
        return recording

    def _give_up(self) -> None:
        """Drop the recording that was not played for longest."""
        kind = next(iter(self._recordings))
        del self._recordings[kind]
        self.played.recorded.remove(kind.name)
        self.played.given_up += 1

    def _record(self, kind: Kind) -> Recording:
        """Nobody plays while it is recorded: all rows are the dummy's."""
        state = self._round.state
        slots_2B = torch.ones(2, kind.requests, dtype=torch.int64, device=state.device)
        slots_2B[0] = state.dummy
        batch = Batch(
            slot_B=slots_2B[0],
            allowance_B=slots_2B[1],
            rows=kind.rows,
            columns=kind.columns,
            needs=kind.needs,
            levels=kind.levels,
            raw_top=kind.raw_top,
            processed_top=kind.processed_top,
        )
        seen: list[Emitted] = []

        def step() -> Tensor:
            # who has finished on the device takes no part, though the host may not know it yet
            emitted = self._round.play(batch, at_work=True)
            seen[:] = [emitted]
            return packed(emitted)

        repeat, block = self._recorder.record(step)
        return Recording(slots_2B, block, seen[0], repeat)

    def _staging(self, recording: Recording) -> Staging:
        """Memory that no round in flight uses."""
        if recording.spare:
            return recording.spare.pop()
        new = self._recorder.staging
        block = new(recording.block)
        return Staging(new(recording.slots_2B), block, unpacked(block, recording.like))

    def _tell(self, staging: Staging, batch: Batch) -> None:
        """Say who plays; the rows behind them are the dummy's, one each."""
        slots_2B, players = staging.slots_2B, len(batch.slot_B)
        slots_2B[0, :players], slots_2B[0, players:] = batch.slot_B, self._round.state.dummy
        slots_2B[1, :players], slots_2B[1, players:] = batch.allowance_B, 1


def _outcome(recording: Recording, staging: Staging, wait: Callable[[], None]) -> Emitted:
    """What one replay has said; its memory is free for the next that is launched."""
    wait()
    recording.spare.append(staging)
    return staging.told


class CudaRecorder:
    """CUDA graphs that share one pool of memory and what belongs to one stream, such as tickets.

    They never run at the same time. A capture that fails keeps its pool, and later ones share the
    next; after as many as may fail none is begun.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._broken: list[torch.cuda.CUDAGraph] = []

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See `Recorder`."""
        if len(self._broken) >= MOST_BROKEN:
            raise RuntimeError(f"{MOST_BROKEN} captures have failed, and keep their memory")
        aside = self._aside
        aside.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UP):
                    step()
        finally:  # whoever launches this round instead must not overtake what has begun
            torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            # a capture that fails leaves the stream on that it was on; the outer context comes back
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=self._pool, stream=aside),
            ):
                result = step()
        except BaseException:
            # the allocator takes this graph to be recording into its pool for ever: it stays, as
            # the allocator asks it, and others have a pool of their own
            self._broken.append(graph)
            self._pool = torch.cuda.graph_pool_handle()
            raise
        return graph.replay, result

    def staging(self, like: Tensor) -> Tensor:
        """See `Recorder`."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def send(self, device: Tensor, staged: Tensor) -> None:
        """See `Recorder`."""
        device.copy_(staged, non_blocking=True)

    def fetch(self, staged: Tensor, device: Tensor) -> Callable[[], None]:
        """See `Recorder`."""
        staged.copy_(device, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return copied.synchronize


def _bucket(count: int) -> int:
    """The smallest of 1, 2, 4, 8, ... that holds `count`."""
    return 1 << (count - 1).bit_length()
