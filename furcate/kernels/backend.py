"""Which kernels do the work of a round: torch's references, or their Triton twins on a GPU.

The choice is made once, when an engine is built, and handed down as an argument. Legend: B
requests, R rows, T flat rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from furcate.errors import Unsupported
from furcate.kernels import accept, entries, kv_move, pools, select, states, tree_attention
from furcate.kernels.arrival import Arrive
from furcate.kernels.beside import Beside
from furcate.kernels.draft import Draft, Verdict
from furcate.kernels.draft_head import Children, Scale
from furcate.kernels.draws import Draws
from furcate.kernels.entries import ReadEntries
from furcate.kernels.grow import Grow, Tally
from furcate.kernels.joint import Join, JointTally
from furcate.kernels.lawful import Limiter
from furcate.kernels.ledger import Settle
from furcate.kernels.ngram import Lookup
from furcate.kernels.pools import Put
from furcate.kernels.select import Select
from furcate.kernels.states import Keep, TailOf
from furcate.kernels.tree_attention import Keys, Sight

__all__ = ["TORCH", "DraftHead", "Kernels", "Look", "TurnLook", "TurnWrite", "kernels_of"]

_LEAST_HEAD = 16  # of a matrix unit


class DraftHead(Protocol):
    """`draft_head` with the target's noise drawn on the fly; `token_V` are draft ids' targets."""

    def __call__(
        self,
        logits_NV: Tensor,
        draws: Draws,
        scale: Scale,
        count: int,
        token_V: Tensor | None = None,
    ) -> Children: ...


Sample = Callable[[Tensor, Draws, Tensor, Tensor | None], Tensor]
"""(logits_TV, draws, broken_T, floor_T or None) -> token_T; writes `broken`."""

Look = Callable[[Tensor, Keys], Tensor]
"""(q_THD, keys) -> out_THD, by the sight of a pass."""

TurnWrite = Callable[[Tensor, tuple[Tensor, Tensor], Keys, Tensor], Tensor]
"""(qkv_TAD, cosines and sines, keys, slot_T) -> q_THD: turns, writes, gives the turned queries."""

TurnLook = Callable[[Tensor, tuple[Tensor, Tensor], Keys], Tensor]
"""(qkv_TAD, cosines and sines, keys) -> out_THD: what `TurnWrite` and then `Look` do."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation of everything that has two; each field's contract is its reference's.

    `sample` and `draft_head` draw noise on the fly, and `limit` knows what else a law may ask.
    Where they are None the law is spelled out over the vocabulary in torch; so it is for a draft
    head where a request has a bias or a mask.
    """

    name: str
    look: Callable[[Sight, int, torch.dtype], Look]
    write: Callable[[Keys, Tensor, Tensor, Tensor], None]
    select: Select
    accept: Callable[[Draft, Tensor, int, Tensor], Verdict]
    move_path: Callable[[tuple[Tensor, Tensor], Tensor, Verdict], None]
    turn_write: TurnWrite | None = None  # None: keys are turned first, and then written
    # by sight, group and dtype; None, or what it gives is None: `turn_write` and then `look`
    turn_look: Callable[[Sight, int, torch.dtype], TurnLook | None] | None = None
    sample: Sample | None = None
    limit: Limiter | None = None
    draft_head: DraftHead | None = None
    grow: Grow | None = None  # None: the drafters' own torch
    tally: Tally | None = None  # None likewise
    batch_invariant: bool = False  # a row's results do not depend on what else is in the batch
    why: str | None = None  # these and not the device's own ones; None: they are its own
    lookup: Lookup | None = None  # None: the reference
    tally_rates: Tally | None = None  # of n-gram matches, tried and right; None: the drafter's own
    join: Join | None = None  # None: the reference
    tally_joint: JointTally | None = None  # None: the drafter's own
    beside: Beside | None = None  # None: a draft network's passes begin in torch
    tail: TailOf = states.tail
    keep: Keep = states.keep
    put: Put = pools.put
    most_put: int | None = None  # nodes of a pool that `put` takes; None: any number
    most_joined: int | None = None  # chains times nodes of a level, padded, that `join` takes
    entries: ReadEntries = entries.entries
    settle: Settle | None = None  # None: `verify.stops.settle`, which lies above
    arrive: Arrive | None = None  # None: the decoder's own embeddings and angles

    def put_why(self, nodes: int) -> str | None:
        """Why the reference puts proposals into pools of so many nodes; None: `put` does."""
        if self.most_put is None or nodes <= self.most_put:
            return None
        return f"the pool has {nodes} nodes, and one program sorts {self.most_put}"

    def join_why(self, chains: int, widest: int) -> str | None:
        """Why the reference joins so many chains with levels of so many nodes; None: `join`."""
        pairs = _padded(chains) * _padded(widest)
        if self.most_joined is None or pairs <= self.most_joined:
            return None
        what = f"{chains} matches beside {widest} nodes of a level are {pairs} pairs once padded"
        return f"{what}, and one program compares {self.most_joined}"

    def fitting(self, dtype: torch.dtype, head_dim: int | None = None) -> Kernels:
        """These, or the references with the reason, for a network that these are not made for.

        Raises Unsupported where the references would not hold what these promise.
        """
        why = None if self.name == TORCH.name else _misfit(dtype, head_dim)
        if why is None:
            return self
        if self.batch_invariant:
            raise Unsupported(why, field="batch_invariant", value=True, hint="leave it out")
        return replace(TORCH, why=why)


def _padded(count: int) -> int:
    """The lanes of a program for so many."""
    return max(2, 1 << (count - 1).bit_length())


def _misfit(dtype: torch.dtype, head_dim: int | None) -> str | None:
    """Why the Triton kernels are not for such a network."""
    if dtype == torch.float64:
        return "the Triton kernels are not for float64"
    if head_dim is not None and (head_dim < _LEAST_HEAD or head_dim & (head_dim - 1)):
        what = f"a power of two from {_LEAST_HEAD} on as head size, and this is {head_dim}"
        return f"the Triton kernels want {what}"
    return None


TORCH = Kernels(
    name="torch",
    look=tree_attention.look,
    write=tree_attention.write,
    select=select.select,
    accept=accept.accept,
    move_path=kv_move.move_path,
)


def kernels_of(device: torch.device, *, batch_invariant: bool = False) -> Kernels:
    """The fastest that the device has.

    With `batch_invariant` a row's results are the same bit for bit whatever other rows and
    requests there are; raises Unsupported on a device that has no such kernels.
    """
    if device.type != "cuda":
        if batch_invariant:
            what = "torch's products on this device depend on the number of rows"
            raise Unsupported(what, field="batch_invariant", value=str(device), hint="use a GPU")
        return TORCH
    # the twins need triton, which machines without a GPU need not have
    on_gpu = import_module("furcate.kernels.backend_triton")
    found: Kernels = on_gpu.INVARIANT if batch_invariant else on_gpu.TRITON
    return found
