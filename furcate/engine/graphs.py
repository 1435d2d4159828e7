"""Rounds as CUDA graphs: one recording for each kind of round, replayed with other numbers.

Requests are rounded up to a bucket with rows of the dummy slot, which owns no page but the scratch
page. All that a round reads is in the state, which never moves; slots and allowances are copied
into the recording's own buffers. Legend: B requests of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from furcate.engine.emitted import Emitted, packed, unpacked
from furcate.engine.player import Eager, Played
from furcate.engine.round import Batch, Round
from furcate.verify.law import Needs

__all__ = ["CudaRecorder", "Graphs", "Kind", "Recorder"]

_LEAST_COLUMNS = 512
_MOST = 128  # recordings; further kinds are launched
_WARM_UP = 2  # plays before a recording, in which kernels are compiled and workspaces made


class Recorder(Protocol):
    """Notes what a function does to the device, to do it again."""

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """(what repeats it, the tensor that holds its result after every repetition).

        Raises RuntimeError where that cannot be done.
        """
        ...

    def staging(self, like: Tensor) -> Tensor:
        """A tensor of this shape on the host, quick to copy from and to."""
        ...

    def wait(self) -> None:
        """Wait for the device."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """Rounds that one recording serves."""

    requests: int
    rows: int
    columns: int
    needs: Needs
    propose: bool
    raw_top: int | None
    processed_top: int | None

    @property
    def name(self) -> str:
        """As `--json` has it."""
        needs = [name for name in Needs.__dataclass_fields__ if getattr(self.needs, name)]
        tops = [self.raw_top is not None and "raw", self.processed_top is not None and "processed"]
        words = [f"{self.requests}x{self.rows}", f"columns={self.columns}", *needs]
        words += [word for word in tops if word] + ["draft"] * self.propose
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Recording:
    """One kind of round, and the buffers through which it is told and tells."""

    slots_2B: Tensor  # int64, slots and allowances, on the device
    slots_on_host: Tensor
    block: Tensor  # `packed`, on the device
    block_on_host: Tensor
    like: Emitted
    repeat: Callable[[], None]


class Graphs:
    """Plays rounds from recordings, made when a kind of round is first asked for.

    A kind that cannot be recorded is launched kernel by kernel from then on, and `played` says why.
    """

    records = True

    def __init__(self, round_: Round, recorder: Recorder) -> None:
        self.played = Played()
        self._round = round_
        self._recorder = recorder
        self._eager = Eager(round_)
        self._recordings: dict[Kind, Recording] = {}
        shape = round_.state.shape
        self._widest = shape.context + round_.most_nodes + 2

    def play(self, batch: Batch) -> Emitted:
        """See `Player`."""
        kind = self.kind_of(batch)
        recording = self._recordings.get(kind) or self._recorded(kind)
        if recording is None:
            self.played.eager += 1
            return self._eager.play(batch)
        self.played.replayed += 1
        self._tell(recording, batch)
        recording.repeat()
        recording.block_on_host.copy_(recording.block, non_blocking=True)
        self._recorder.wait()
        return unpacked(recording.block_on_host, recording.like)

    def kind_of(self, batch: Batch) -> Kind:
        """The smallest bucket that holds a round."""
        most, vocab = self._round.state.shape.capacity, self._round.state.shape.vocab
        top_k = min(_bucket(batch.needs.top_k), vocab) if batch.needs.top_k else 0
        return Kind(
            requests=min(_bucket(len(batch.slot_B)), max(most, len(batch.slot_B))),
            rows=batch.rows,
            columns=min(_bucket(max(batch.columns, _LEAST_COLUMNS)), self._widest),
            needs=replace(batch.needs, top_k=top_k),
            propose=batch.propose,
            raw_top=batch.raw_top,
            processed_top=batch.processed_top,
        )

    def _recorded(self, kind: Kind) -> Recording | None:
        """Record a kind of round, or note why that cannot be done."""
        if kind.name in self.played.refused:
            return None
        if len(self._recordings) >= _MOST:
            self.played.refused[kind.name] = f"{_MOST} kinds of rounds are recorded already"
            return None
        try:
            recording = self._record(kind)
        except RuntimeError as fault:
            self.played.refused[kind.name] = f"{type(fault).__name__}: {fault}".splitlines()[0]
            return None
        self.played.recorded.append(kind.name)
        self._recordings[kind] = recording
        return recording

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
            propose=kind.propose,
            raw_top=kind.raw_top,
            processed_top=kind.processed_top,
        )
        seen: list[Emitted] = []

        def step() -> Tensor:
            emitted = self._round.play(batch)
            seen[:] = [emitted]
            return packed(emitted)

        repeat, block = self._recorder.record(step)
        staging = self._recorder.staging
        return Recording(slots_2B, staging(slots_2B), block, staging(block), seen[0], repeat)

    def _tell(self, recording: Recording, batch: Batch) -> None:
        """Say who plays; the rows behind them are the dummy's, one each."""
        on_host, players = recording.slots_on_host, len(batch.slot_B)
        on_host[0, :players], on_host[0, players:] = batch.slot_B, self._round.state.dummy
        on_host[1, :players], on_host[1, players:] = batch.allowance_B, 1
        recording.slots_2B.copy_(on_host, non_blocking=True)


class CudaRecorder:
    """CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See `Recorder`."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = step()
        return graph.replay, result

    def staging(self, like: Tensor) -> Tensor:
        """See `Recorder`."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def wait(self) -> None:
        """See `Recorder`."""
        torch.cuda.current_stream().synchronize()


def _bucket(count: int) -> int:
    """The smallest of 1, 2, 4, 8, ... that holds `count`."""
    return 1 << (count - 1).bit_length()
