"""Attention that turns and writes by itself leaves what two launches leave, bit for bit.

Unwritten memory is NaN, and so are the slots of the rows' own keys before the launch: whoever reads
one too early shows it. Legend: B requests, R rows, T = B * R flat rows, S slots, N columns of the
tree, A heads of a projection, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kv_cases import Layout, layout
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.kernels.attention_looks_triton import look, turn_look
from furcate.kernels.tree_attention import Keys, Places, Sight, behind
from furcate.kernels.tree_attention_triton import Tile, tree_attention
from furcate.kernels.turn_write_triton import turn_write
from furcate.models.rope import Rope
from furcate.models.spec import RopeSpec

pytestmark = MARKS

NAN = float("nan")
DTYPES = [torch.float32, torch.float16] if DEVICE.type == "cpu" else [torch.float16, torch.bfloat16]
HEADS = [(1, 1), (4, 2), (9, 3), (8, 1)]


@dataclass
class Pass:
    """One pass on the device, nothing of its rows written yet."""

    sight: Sight
    qkv_TAD: Tensor
    angles: tuple[Tensor, Tensor]
    pool: Keys

    def fresh(self) -> Keys:
        return Keys(self.pool.k_SKD.clone(), self.pool.v_SKD.clone())

    def by_one(self, splits: int, tile: Tile) -> tuple[Tensor, Keys]:
        keys = self.fresh()
        cut = {"splits": splits, "tile": tile}
        out_THD = tree_attention(self.qkv_TAD, keys, self.sight, angles=self.angles, **cut)
        return out_THD, keys

    def by_two(self, splits: int, tile: Tile) -> tuple[Tensor, Keys]:
        keys = self.fresh()
        q_THD = turn_write(self.qkv_TAD, self.angles, keys, self.sight.write_T)
        return tree_attention(q_THD, keys, self.sight, splits=splits, tile=tile), keys


def random_pass(
    where: Layout,
    heads: tuple[int, int] = (4, 2),
    size: int = 16,
    dtype: torch.dtype = torch.float16,
    first: int = 0,
) -> Pass:
    rng = torch.Generator().manual_seed(where.columns)
    (query, kv), draft = heads, where.draft
    batch, rows = draft.tokens_BR.shape
    pool_S = (where.pages + 1) * where.page_size
    pool = Keys(*(torch.full((pool_S, kv, size), NAN) for _ in "kv"))
    for b, length in enumerate(where.length_B.tolist()):
        for x_SKD in (pool.k_SKD, pool.v_SKD):
            seen = where.slots(b, length, first)
            x_SKD[seen] = torch.randn(len(seen), kv, size, generator=rng)
    qkv_TAD = torch.randn(batch, rows, query + 2 * kv, size, generator=rng)
    for b, live in enumerate(draft.live_B.tolist()):
        qkv_TAD[b, live:] = NAN  # what pads ask does not matter
    at_BR = where.length_B[:, None] + torch.arange(rows)
    by = Rope(RopeSpec(theta=1e4), size, dtype, torch.device("cpu"))(at_BR.flatten())
    table_BP, length_B = where.table_BP.to(DEVICE), where.length_B.to(DEVICE)
    places = Places(table_BP, length_B, where.page_size, where.columns)
    return Pass(
        behind(places, draft.end_BR.to(DEVICE), draft.live_B.to(DEVICE), first),
        qkv_TAD.flatten(0, 1).to(DEVICE, dtype),
        (by.cos_T1D.to(DEVICE), by.sin_T1D.to(DEVICE)),
        Keys(pool.k_SKD.to(DEVICE, dtype), pool.v_SKD.to(DEVICE, dtype)),
    )


def bits(x: Tensor) -> Tensor:
    """NaN is equal to itself here."""
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def assert_same(case: Pass, splits: int, tile: Tile) -> None:
    (one_THD, ours), (two_THD, theirs) = case.by_one(splits, tile), case.by_two(splits, tile)
    assert one_THD.isfinite().all() and torch.equal(one_THD, two_THD)
    page = case.sight.places.page_size  # pads write to the scratch page, or need not write
    for mine, told in ((ours.k_SKD, theirs.k_SKD), (ours.v_SKD, theirs.v_SKD)):
        assert torch.equal(bits(mine[page:]), bits(told[page:]))
        assert not torch.equal(bits(mine[page:]), bits(case.pool.k_SKD[page:])), "and written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("size", [16, 64, 128])
def test_every_shape_is_that_of_two_launches(
    size: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    rows = max(1, 16 * heads[1] // heads[0])
    case = random_pass(layout(rows, [37, 0, 64], rows, 16), heads, size, dtype)
    assert_same(case, 1, Tile(16, 32))
    assert_same(case, 3, Tile(16, 16))


@pytest.mark.parametrize("cut", [{}, {"folded": 0}, {"masked": False}], ids=str)
@pytest.mark.parametrize("splits", [1, 2, 9])
@pytest.mark.parametrize("length", [0, 12, 16, 63, 130])
def test_a_tree_that_lies_in_two_steps_is_written_by_two_splits(
    length: int, splits: int, cut: dict[str, Any]
) -> None:
    """Nine splits of 16 columns take a step each, without a loop."""
    case = random_pass(layout(length, [length, 30], 8, 16, full=True), (2, 1))
    assert_same(case, splits, replace(Tile(16, 16), **cut))


@pytest.mark.parametrize("splits", [1, 3])
def test_more_rows_than_are_written_at_a_time_take_several_turns(splits: int) -> None:
    case = random_pass(layout(3, [41, 7], 30, 16, full=True), (2, 1))
    assert_same(case, splits, Tile(64, 16, masked=False))


@pytest.mark.parametrize("heads", [(2, 1), (9, 3)], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_rows_of_several_tiles_are_each_turned_and_written_as_by_two_launches(
    splits: int, heads: tuple[int, int]
) -> None:
    case = random_pass(layout(4, [41, 7], 29, 16), heads)
    assert_same(case, splits, Tile(16, 16))
    assert_same(case, splits, Tile(32, 32, masked=False))


@pytest.mark.parametrize("first", [1, 17, 40])
def test_rows_in_hidden_columns_are_written_all_the_same(first: int) -> None:
    case = random_pass(layout(first, [45, 40, 41], 5, 16, full=True), first=first)
    for splits in (1, 2, 5):
        assert_same(case, splits, Tile(16, 16))
    short = random_pass(layout(5, [3, 19], 5, 16, full=True), first=first)
    keys, told = short.by_one(2, Tile(16, 16))[1], short.by_two(2, Tile(16, 16))[1]
    assert torch.equal(bits(keys.k_SKD), bits(told.k_SKD))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_level_of_a_draft_writes_the_last_columns_of_its_tree(rows: int, splits: int) -> None:
    nodes, lengths = 21, [37, 1, 64]
    where = layout(nodes, lengths, nodes, 16, full=True)
    case = random_pass(where)
    rng = torch.Generator().manual_seed(rows)
    own_BN = torch.tensor([where.slots(b, n + nodes, n) for b, n in enumerate(lengths)])
    own_BN = own_BN[:, torch.randperm(nodes, generator=rng)]
    old = own_BN[:, : nodes - rows].flatten().to(DEVICE)  # earlier levels
    for x_SKD in (case.pool.k_SKD, case.pool.v_SKD):
        x_SKD[old] = torch.randn(x_SKD[old].shape, generator=rng).to(x_SKD)
    sees_BRN = (torch.rand(3, rows, nodes, generator=rng) < 0.4).to(DEVICE)
    sees_BRN[:, :, -1] = True
    slot_BN, live_B = own_BN.to(DEVICE), torch.full((3,), nodes, device=DEVICE)
    sight = Sight(case.sight.places, slot_BN, slot_BN, live_B, sees_BRN)
    taken = slice(None, 3 * rows)
    cos_T1D, sin_T1D = (x[taken].contiguous() for x in case.angles)
    level = replace(
        case, sight=sight, qkv_TAD=case.qkv_TAD[taken].contiguous(), angles=(cos_T1D, sin_T1D)
    )
    assert_same(level, splits, Tile(16, 16))


def test_few_rows_are_turned_at_once_and_many_are_not() -> None:
    case = random_pass(layout(4, [37, 150], 8, 16, full=True))
    at_once = turn_look(case.sight, 2, torch.float16)
    assert at_once is not None and turn_look(case.sight, 3, torch.float16) is None
    ours, theirs = case.fresh(), case.fresh()
    out_THD = at_once(case.qkv_TAD, case.angles, ours)
    q_THD = turn_write(case.qkv_TAD, case.angles, theirs, case.sight.write_T)
    assert torch.equal(out_THD, look(case.sight, 2, torch.float16)(q_THD, theirs))
    assert torch.equal(bits(ours.k_SKD), bits(theirs.k_SKD))


def test_the_comparison_can_fail() -> None:
    case = random_pass(layout(5, [20], 4, 16, full=True))
    cos_T1D, sin_T1D = case.angles
    other = replace(case, angles=(cos_T1D, -sin_T1D))
    one_THD, ours = other.by_one(2, Tile(16, 16))
    two_THD, theirs = case.by_two(2, Tile(16, 16))
    assert not torch.equal(one_THD, two_THD)
    assert not torch.equal(bits(ours.k_SKD), bits(theirs.k_SKD))
