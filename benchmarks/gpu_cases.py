"""Random pages, trees and chains for the GPU scripts.

Legend: B requests, P pages of a table, N nodes of a pool, R rows, L layers, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from furcate.kernels.draft import Draft, Proposal
from furcate.kernels.select import select
from furcate.kernels.tree_attention import SCRATCH, Places, behind

__all__ = ["Case", "as_chain", "case", "distance", "poisoned", "pool_of", "proposal", "tree"]


@dataclass(frozen=True)
class Case:
    """Requests of one length with trees of so many rows, all rows in use."""

    places: Places
    draft: Draft
    pages: int

    @property
    def slots(self) -> int:
        """Of a pool, scratch page included."""
        return (self.pages + 1) * self.places.page_size

    @property
    def owned_S(self) -> Tensor:
        """bool, slots of cached tokens and of the tree: all others are nobody's."""
        places = self.places
        owned_S = torch.zeros(self.slots, dtype=torch.bool, device=places.table_BP.device)
        start_BP = places.table_BP * places.page_size
        slot_BX = start_BP[:, :, None] + torch.arange(places.page_size, device=owned_S.device)
        rows = self.draft.tokens_BR.shape[1]
        owned_S[slot_BX.flatten(1)[:, : int(places.length_B[0]) + rows].flatten()] = True
        owned_S[SCRATCH] = True
        return owned_S

    @property
    def slot_BR(self) -> Tensor:
        """Where the tree lies."""
        return behind(self.places, self.draft.end_BR, self.draft.live_B).slot_BN


def case(batch: int, length: int, rows: int, device: torch.device, page_size: int = 16) -> Case:
    """Pages lie in random order."""
    width = -(-(length + rows) // page_size)
    table_BP = torch.randperm(batch * width, device=device).view(batch, width) + 1
    length_B = torch.full((batch,), length, device=device)
    places = Places(table_BP, length_B, page_size, length + rows)
    return Case(places, tree(batch, rows, device), batch * width)


def as_chain(made: Case) -> Case:
    """The same places and tokens, every row below the one before it."""
    draft, rows = made.draft, made.draft.tokens_BR.shape[1]
    r_BR = torch.arange(rows, device=draft.end_BR.device).expand_as(draft.end_BR).contiguous()
    up_BR, end_BR = (r_BR - 1).clamp_min(0), torch.full_like(r_BR, rows)
    return replace(made, draft=replace(draft, parent_BR=up_BR, depth_BR=r_BR, end_BR=end_BR))


def pool_of(made: Case, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[S, ...] of random numbers, NaN in slots that nobody owns, and a scratch slot of zeros."""
    device = made.places.table_BP.device
    pool = torch.full((made.slots, *shape), torch.nan, dtype=dtype, device=device)
    owned_S = made.owned_S
    pool[owned_S] = torch.randn((int(owned_S.sum()), *shape), dtype=dtype, device=device)
    pool[SCRATCH] = 0
    return pool


def tree(batch: int, rows: int, device: torch.device) -> Draft:
    """A random tree; its nodes' tokens are all different."""
    pool = max(1, 2 * rows)
    root_B = torch.zeros(batch, dtype=torch.int64, device=device)
    allowance_B = torch.full_like(root_B, rows)
    return select(proposal(batch, pool, device), root_B, rows, allowance_B)


def proposal(batch: int, pool: int, device: torch.device) -> Proposal:
    """Every node below a random earlier one, and worth less."""
    at_N = torch.arange(pool)
    parent_BN = (torch.rand(batch, pool) * (at_N + 1)).long() - 1
    step_BN = torch.rand(batch, pool) * 0.7 + 0.05
    depth_BN, value_BN = torch.ones(batch, pool, dtype=torch.int64), -step_BN
    for n in range(1, pool):
        up_B1 = parent_BN[:, n : n + 1]
        below_B = up_B1[:, 0] >= 0
        depth_BN[:, n] += torch.where(below_B, depth_BN.gather(1, up_B1.clamp_min(0))[:, 0], 0)
        value_BN[:, n] += torch.where(below_B, value_BN.gather(1, up_B1.clamp_min(0))[:, 0], 0)
    made = (at_N.expand(batch, -1) + 1, parent_BN, depth_BN, value_BN, at_N.expand(batch, -1))
    return Proposal(*(x.contiguous().to(device) for x in made))


def distance(one: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm of the other; NaN where anything is not finite."""
    return float((one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-30))


@contextmanager
def poisoned() -> Iterator[None]:
    """What nobody has written is NaN meanwhile, or the largest whole number."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
