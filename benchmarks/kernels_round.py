"""Rows of `kernels_gpu.py`: what a round does with trees, paths and pages, beside the network.

Legend: B requests, R rows, D levels.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from gpu_cases import case, poisoned, proposal
from gpu_timing import timed
from kernels_bench import Bench, equal
from torch import Tensor

from furcate.kernels import accept as accepting
from furcate.kernels import select as selecting
from furcate.kernels import wipe as wiping
from furcate.kernels.draft import Verdict
from furcate.kernels.kv_move import move_path
from furcate.models.spec import DecoderSpec

__all__ = ["bookkeeping", "moving", "selecting_rows", "walking", "wiping_pages"]

Row = dict[str, Any]
DEEPEST = 8  # levels that are moved


def selecting_rows(bench: Bench, batch: int, rows: int) -> Row:
    """The tree of a round out of a pool four times its size."""
    pool = proposal(batch, 4 * rows, bench.device)
    root_B = torch.zeros(batch, dtype=torch.int64, device=bench.device)
    asked = (pool, root_B, rows, torch.full_like(root_B, rows))
    with poisoned():
        same = equal(bench.kernels.select(*asked), selecting.select(*asked))
    return bench.row(same, timed(lambda: bench.kernels.select(*asked), bench.device))


def walking(bench: Bench, batch: int, rows: int) -> Row:
    """The walk down it; the target follows the likeliest child seven times in ten."""
    draft = case(batch, 16, rows, bench.device).draft
    right_BR = torch.rand(batch, rows, device=bench.device) < 0.7
    child_BR = draft.tokens_BR.roll(-1, 1)  # the likeliest child comes next
    choice_BR = torch.where(right_BR, child_BR, 0)
    asked = (draft, choice_BR, int(draft.depth_BR.max()), torch.zeros_like(right_BR))
    with poisoned():
        same = equal(bench.kernels.accept(*asked), accepting.accept(*asked))
    return bench.row(same, timed(lambda: bench.kernels.accept(*asked), bench.device))


def moving(bench: Bench, spec: DecoderSpec, batch: int, rows: int, *, stays: bool) -> Row:
    """All layers: a path that must move, or the likeliest one, which need not."""
    made = case(batch, 100, rows, bench.device)
    deepest = min(DEEPEST, rows - 1)
    path = range(1, deepest + 1) if stays else range(rows - deepest, rows)
    verdict = _verdict([0, *path], batch, bench.device)
    ours, theirs = _pools(bench, spec, made.slots)
    slot_BR = made.slot_BR
    bench.kernels.move_path(ours, slot_BR, verdict)
    move_path(theirs, slot_BR, verdict)
    # the reference copies the scratch slot onto itself
    same = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    slot = spec.num_kv_heads * spec.head_dim * bench.dtype.itemsize
    moved = 0 if stays else 4 * batch * deepest * spec.num_layers * slot
    timing = timed(lambda: bench.kernels.move_path(ours, slot_BR, verdict), bench.device)
    return bench.row(same, timing, moved=moved)


def wiping_pages(bench: Bench, spec: DecoderSpec, pages: int) -> Row:
    """Pages of all layers, keys and values."""
    ours, theirs = _pools(bench, spec, 4 * pages * 16)
    page_X = torch.randperm(4 * pages - 1, device=bench.device)[:pages] + 1
    wipe = _wipe_of(bench)
    wipe(ours, page_X, 16)
    wiping.wipe(theirs, page_X, 16)
    same = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    slot = spec.num_kv_heads * spec.head_dim * bench.dtype.itemsize
    timing = timed(lambda: wipe(ours, page_X, 16), bench.device)
    return bench.row(same, timing, moved=2 * pages * 16 * spec.num_layers * slot)


def bookkeeping(bench: Bench, spec: DecoderSpec, batch: int, rows: int) -> Row:
    """Select, walk and move, one behind the other: what a tree costs beside the two networks."""
    made = case(batch, 100, rows, bench.device)
    pool = proposal(batch, 4 * rows, bench.device)
    root_B = torch.zeros(batch, dtype=torch.int64, device=bench.device)
    allowance_B = torch.full_like(root_B, rows)
    choice_BR = bench.kernels.select(pool, root_B, rows, allowance_B).tokens_BR
    choice_BR = choice_BR.roll(-1, 1).contiguous()
    broken_BR = torch.zeros_like(choice_BR, dtype=torch.bool)
    depth = int(pool.depth_BP.max())
    pools, slot_BR = _pools(bench, spec, made.slots)[0], made.slot_BR
    verdict = _verdict([0, *range(rows - min(DEEPEST, rows - 1), rows)], batch, bench.device)

    def call() -> None:
        draft = bench.kernels.select(pool, root_B, rows, allowance_B)
        bench.kernels.accept(draft, choice_BR, depth, broken_BR)
        bench.kernels.move_path(pools, slot_BR, verdict)

    return bench.row(True, timed(call, bench.device))


def _verdict(path: list[int], batch: int, device: torch.device) -> Verdict:
    path_BD = torch.tensor(path, device=device).expand(batch, -1).contiguous()
    count_B = torch.full((batch,), len(path), device=device)
    return Verdict(path_BD, path_BD, count_B, count_B - 1)


def _pools(
    bench: Bench, spec: DecoderSpec, slots: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Keys and values, twice the same."""
    size = (spec.num_layers, slots, spec.num_kv_heads, spec.head_dim)
    k, v = bench.random(*size), bench.random(*size)
    return (k, v), (k.clone(), v.clone())


def _wipe_of(bench: Bench) -> Callable[..., None]:
    """The twin where there is a GPU; importing it needs triton."""
    if bench.device.type != "cuda":
        return wiping.wipe
    found: Callable[..., None] = import_module("furcate.kernels.wipe_triton").wipe
    return found
