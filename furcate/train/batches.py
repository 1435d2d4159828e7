"""Lays whole conversations end to end into batches of one size, epoch after epoch.

Legend: T rows of a batch, A lookahead, N rows with a loss, S conversations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furcate.errors import BadFile
from furcate.kernels.packed_attention import Packing
from furcate.train.corpus import Conversation, Corpus

__all__ = ["Batch", "Order", "Split", "lay_out", "split"]

_EPOCHS, _HELD_OUT = 0, 1  # streams of random numbers


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations end to end, on the device.

    Row n of the losses stands for position `at_N[n]`: the target's law there is for token
    `at_N[n] + 1`, which lies in an answer. Step k of a draft guesses it from row `at_N[n] - k`.
    """

    tokens_TA: Tensor  # int64 [T + A]: the batch's tokens, then zeros that no loss sees
    positions_T: Tensor  # int64, from 0 in each conversation
    packing: Packing
    at_N: Tensor  # int64
    begin_N: Tensor  # int64, first row of the conversation

    def rows(self, step: int) -> Tensor:
        """From which row step k guesses, int64 [N]; T where the conversation begins later."""
        row_N = self.at_N - step
        return torch.where(row_N >= self.begin_N, row_N, len(self.positions_T))


@dataclass(frozen=True, slots=True)
class Split:
    """Conversations to learn from, and those kept for measuring."""

    train_I: NDArray[np.int64]
    held_out_I: NDArray[np.int64]


def split(corpus: Corpus, held_out: int, seed: int) -> Split:
    """Keep `held_out` conversations, but at most a tenth; which ones, the seed says.

    Raises:
        BadFile: the corpus is too short for both.
    """
    count = len(corpus)
    if count < 2:
        hint = "write or give more text"
        raise BadFile("too little text to learn from", field="--data", value=count, hint=hint)
    kept = min(held_out, max(1, count // 10))
    order_I = _rng(seed, _HELD_OUT, 0).permutation(count)
    chosen = Split(np.sort(order_I[kept:]), np.sort(order_I[:kept]))
    for part_I in (chosen.train_I, chosen.held_out_I):
        if not any(len(_answers(corpus[int(i)])) for i in part_I):
            hint = "write or give more text"
            raise BadFile("too few answers to learn from", field="--data", hint=hint)
    return chosen


class Order:
    """Conversations in a new order each epoch; `taken` is all that must be kept to go on.

    Args:
        train_I: the conversations.
        seed: of the orders.
        taken: how many have been handed out.
    """

    def __init__(self, train_I: NDArray[np.int64], seed: int, taken: int = 0) -> None:
        self.taken = taken
        self._train_I = train_I
        self._seed = seed
        self._epoch = -1
        self._order_I = train_I

    @property
    def epochs(self) -> float:
        """How often each conversation has been handed out, on average."""
        return self.taken / len(self._train_I)

    def next(self) -> int:
        """The next conversation's index in the corpus."""
        epoch, at = divmod(self.taken, len(self._train_I))
        if epoch != self._epoch:
            self._order_I = _rng(self._seed, _EPOCHS, epoch).permutation(self._train_I)
            self._epoch = epoch
        self.taken += 1
        return int(self._order_I[at])

    def fill(self, corpus: Corpus, size: int) -> Iterator[Conversation]:
        """Conversations of `size` tokens in all, the last one cut."""
        while size > 0:
            whole = corpus[self.next()]
            yield Conversation(whole.tokens[:size], whole.parts)
            size -= len(whole.tokens)


def lay_out(talks: Sequence[Conversation], lookahead: int, device: torch.device) -> Batch:
    """A batch of these conversations."""
    lengths = [len(talk.tokens) for talk in talks]
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    tokens_TA = np.zeros(int(bounds[-1]) + lookahead, np.int64)
    np.concatenate([talk.tokens for talk in talks], out=tokens_TA[: bounds[-1]], casting="safe")
    positions_T = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    answers = [_answers(talk) for talk in talks]
    at_N = np.concatenate([at + np.array(each) for at, each in zip(bounds, answers, strict=False)])
    begin_N = np.repeat(bounds[:-1], [len(each) for each in answers])
    return Batch(
        _on(device, tokens_TA),
        _on(device, positions_T),
        Packing.of(tuple(bounds.tolist()), device),
        _on(device, at_N),
        _on(device, begin_N),
    )


def _answers(talk: Conversation) -> NDArray[np.int64]:
    """Positions whose next token is there and in an answer; the first has nothing before it."""
    last = len(talk.tokens) - 1
    spans = [np.arange(max(a.start - 1, 1), min(a.end - 1, last)) for a in talk.spans]
    return np.concatenate([np.zeros(0, np.int64), *spans])


def _on(device: torch.device, array: NDArray[Any]) -> Tensor:
    tensor = torch.from_numpy(array.astype(np.int64, copy=False))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _rng(seed: int, stream: int, epoch: int) -> np.random.Generator:
    return np.random.default_rng((seed, stream, epoch))
