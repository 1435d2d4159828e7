"""What the GPU scripts share: timing by recorded graphs, ceilings, random pages and trees.

Legend: B requests, P pages of a table, N nodes of a pool, R rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from furcate.kernels.draft import Draft, Proposal
from furcate.kernels.select import select
from furcate.kernels.tree_attention import Places

REPEATS = 20  # calls in one recording, so that the gap between replays does not count
ROUNDS = 15  # replays; the median counts


def median_ms(call: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one call: of a recording on a GPU, of the wall clock on a CPU."""
    if device.type != "cuda":
        return statistics.median(_wall(call) for _ in range(3))
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    graph.replay()
    return statistics.median(_replayed(graph) for _ in range(ROUNDS)) / REPEATS


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in "be")
    began.record()
    graph.replay()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def _wall(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def ceilings(device: torch.device, *, tiny: bool) -> dict[str, float]:
    """Of this device, now: bytes read and written by a large copy, a large product in bf16."""
    count, side = (1 << 20, 256) if tiny else (1 << 30, 8192)
    source = torch.randn(count // 4, device=device)
    target = torch.empty_like(source)
    copy_ms = median_ms(lambda: target.copy_(source), device)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in "ab")
    product_ms = median_ms(lambda: a @ b, device)
    return {
        "copy_gb_per_s": 2 * source.nbytes / copy_ms / 1e6,
        "bf16_tflop_per_s": 2 * side**3 / product_ms / 1e9,
    }


@dataclass(frozen=True)
class Case:
    """Requests of one length with random trees of so many rows, all rows in use."""

    places: Places
    draft: Draft
    pages: int

    @property
    def slots(self) -> int:
        return (self.pages + 1) * self.places.page_size


def case(batch: int, length: int, rows: int, device: torch.device, page_size: int = 16) -> Case:
    """Pages lie in random order."""
    width = -(-(length + rows) // page_size)
    table_BP = torch.randperm(batch * width, device=device).view(batch, width) + 1
    length_B = torch.full((batch,), length, device=device)
    places = Places(table_BP, length_B, page_size, length + rows)
    return Case(places, tree(batch, rows, device), batch * width)


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
