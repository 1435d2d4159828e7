"""What the host reads once a round has ended, as one block of bytes.

Legend: B requests, D levels, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch
from torch import Tensor

from furcate.config import SamplingParams
from furcate.engine.outputs import TokenLogprob
from furcate.verify.logprobs import Logprobs

__all__ = ["Emitted", "Told", "packed", "unpacked"]


@dataclass(frozen=True, slots=True)
class Emitted:
    """The outcome of a round, on the device until it is asked for."""

    tokens_BD: Tensor
    count_B: Tensor
    accepted_B: Tensor
    finish_B: Tensor  # a `Finish`
    drafted_B: Tensor
    offered_B: Tensor  # bool: the accepted path had a further child to try
    strayed_B: Tensor  # bool: the accepted path was not the likeliest
    broken_B: Tensor  # bool: the target's logits allow no choice
    gain_BN: Tensor  # acceptance probabilities of the next draft's nodes, best first
    raw: Logprobs | None
    processed: Logprobs | None

    def on_host(self) -> Emitted:
        """The same on the host, by one copy, which waits for the device."""
        if self.count_B.device.type == "cpu":
            return self
        return unpacked(packed(self).cpu(), self)

    def told(self) -> list[Told]:
        """What each request got, logprobs aside."""
        columns = [getattr(self, f"{field.name}_B").tolist() for field in fields(Told)[2:]]
        shown = zip(self.tokens_BD.tolist(), self.count_B.tolist(), strict=True)
        tokens = [row[:count] for row, count in shown]
        return [Told(*one) for one in zip(tokens, self.gain_BN.tolist(), *columns, strict=True)]

    def logprobs(self, b: int, kept: Sequence[int], params: SamplingParams) -> list[TokenLogprob]:
        """Those of request b's tokens, as its parameters ask for them."""
        if not params.logprobs:
            return []
        told = self.raw if params.logprobs_mode == "raw" else self.processed
        assert told is not None
        chosen = told.chosen_BD[b].tolist()
        ids = told.top_id_BDK[b].tolist()
        values = told.top_BDK[b].tolist()
        top = params.top_logprobs
        return [
            TokenLogprob(t, chosen[d], tuple(zip(ids[d][:top], values[d][:top], strict=True)))
            for d, t in enumerate(kept)
        ]


@dataclass(frozen=True, slots=True)
class Told:
    """One request's outcome in plain numbers."""

    tokens: list[int]
    gains: list[float]
    accepted: int
    finish: int
    drafted: int
    offered: bool
    strayed: bool
    broken: bool


def packed(emitted: Emitted) -> Tensor:
    """All of it as bytes, widest numbers first so that each lies aligned: uint8 [bytes]."""
    parts = _parts(emitted)
    pieces: list[Tensor] = []
    for i in _by_width(parts):
        if parts[i].numel() == 0:
            continue
        piece = parts[i].contiguous().flatten().view(torch.uint8)
        if pieces and _follows(piece, pieces[-1]):
            size = len(pieces[-1]) + len(piece)
            piece = pieces.pop().as_strided((size,), (1,))
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _follows(piece: Tensor, before: Tensor) -> bool:
    """Whether two stretches of bytes lie one behind the other, so that nothing need be copied."""
    if piece.untyped_storage()._cdata != before.untyped_storage()._cdata:
        return False
    return piece.storage_offset() == before.storage_offset() + len(before)


def unpacked(block: Tensor, like: Emitted) -> Emitted:
    """`packed` undone; `like` has the shapes and dtypes."""
    parts = _parts(like)
    order = _by_width(parts)
    ends = accumulate(parts[i].nbytes for i in order)
    found = dict[int, Tensor]()
    for i, end in zip(order, ends, strict=True):
        own = block[end - parts[i].nbytes : end]
        found[i] = own.view(parts[i].dtype).view(parts[i].shape)
    return _with(like, [found[i] for i in range(len(parts))])


def _by_width(parts: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(parts)), key=lambda i: -parts[i].itemsize)


def _parts(emitted: Emitted) -> list[Tensor]:
    """All tensors, in the order of their fields."""
    parts: list[Tensor] = []
    for field in fields(emitted):
        value = getattr(emitted, field.name)
        if isinstance(value, Tensor):
            parts.append(value)
        elif value is not None:
            parts += [getattr(value, inner.name) for inner in fields(value)]
    return parts


def _with(like: Emitted, parts: Sequence[Tensor]) -> Emitted:
    """`like` with other tensors."""
    rest = iter(parts)
    changes: dict[str, Tensor | Logprobs] = {}
    for field in fields(like):
        value = getattr(like, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = next(rest)
        elif value is not None:
            changes[field.name] = Logprobs(*(next(rest) for _ in fields(value)))
    return replace(like, **changes)  # type: ignore[arg-type]
