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

from furcate.kernels import accept, kv_move, select, tree_attention
from furcate.kernels.draft import Draft, Proposal, Verdict
from furcate.kernels.draft_head import Children, Scale
from furcate.kernels.draws import Draws
from furcate.kernels.tree_attention import Keys, Sight

__all__ = ["TORCH", "DraftHead", "Kernels", "Look", "TurnWrite", "kernels_of"]

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


Look = Callable[[Tensor, Keys], Tensor]
"""(q_THD, keys) -> out_THD, by the sight of a pass."""

TurnWrite = Callable[[Tensor, tuple[Tensor, Tensor], Keys, Tensor], Tensor]
"""(qkv_TAD, cosines and sines, keys, slot_T) -> q_THD: turns, writes, gives the turned queries."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """One implementation of everything that has two; each field's contract is its reference's.

    `sample` and `draft_head` draw noise on the fly. Where they are None, or a request needs a
    filter, a penalty, a mask or a bias, the law is spelled out over the vocabulary in torch.
    """

    name: str
    look: Callable[[Sight, int, torch.dtype], Look]
    write: Callable[[Keys, Tensor, Tensor, Tensor], None]
    select: Callable[[Proposal, Tensor, int, Tensor], Draft]
    accept: Callable[[Draft, Tensor, int, Tensor], Verdict]
    move_path: Callable[[tuple[Tensor, Tensor], Tensor, Verdict], None]
    turn_write: TurnWrite | None = None  # None: keys are turned first, and then written
    sample: Callable[[Tensor, Draws, Tensor], Tensor] | None = None
    draft_head: DraftHead | None = None
    why: str | None = None  # these and not the device's own ones; None: they are its own

    def fitting(self, dtype: torch.dtype, head_dim: int | None = None) -> Kernels:
        """These, or the references with the reason, for a network that these are not made for."""
        if self.name == TORCH.name:
            return self
        if dtype == torch.float64:
            return replace(TORCH, why="the Triton kernels are not for float64")
        if head_dim is not None and (head_dim < _LEAST_HEAD or head_dim & (head_dim - 1)):
            what = f"a power of two from {_LEAST_HEAD} on as head size, and this is {head_dim}"
            return replace(TORCH, why=f"the Triton kernels want {what}")
        return self


TORCH = Kernels(
    name="torch",
    look=tree_attention.look,
    write=tree_attention.write,
    select=select.select,
    accept=accept.accept,
    move_path=kv_move.move_path,
)


def kernels_of(device: torch.device) -> Kernels:
    """The fastest that the device has."""
    if device.type != "cuda":
        return TORCH
    # the twins need triton, which machines without a GPU need not have
    on_gpu: Kernels = import_module("furcate.kernels.backend_triton").TRITON
    return on_gpu
