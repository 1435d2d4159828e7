"""Turning and writing in one launch leaves what the two references leave one after the other."""

from __future__ import annotations

import pytest
import torch
from poison import unwritten_numbers_are_poison  # noqa: F401 (a fixture)
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.kernels.tree_attention import Keys, write
from furcate.kernels.turn_write_triton import turn_write
from furcate.models import rope
from furcate.models.spec import RopeSpec

pytestmark = [*MARKS, pytest.mark.usefixtures("unwritten_numbers_are_poison")]

HALVES = [torch.float16] if DEVICE.type == "cpu" else [torch.float16, torch.bfloat16]
SLOTS = 30


def by_two(qkv_TAD: Tensor, by: rope.Turn, slot_T: Tensor, kv: int) -> tuple[Tensor, Keys]:
    """The references, in the dtype that is given."""
    heads, size = qkv_TAD.shape[1] - 2 * kv, qkv_TAD.shape[2]
    pool = Keys(*(torch.full((SLOTS, kv, size), -5.0, dtype=qkv_TAD.dtype) for _ in "kv"))
    turned_TAD = rope.turn(qkv_TAD[:, : heads + kv], by)
    write(pool, slot_T, turned_TAD[:, heads:], qkv_TAD[:, heads + kv :])
    return turned_TAD[:, :heads], pool


def made(
    rows: int, heads: int, kv: int, size: int, dtype: torch.dtype
) -> tuple[Tensor, rope.Turn, Tensor]:
    rng = torch.Generator().manual_seed(rows)
    qkv_TAD = torch.randn(rows, heads + 2 * kv, size, generator=rng).to(dtype)
    spec = rope.Rope(RopeSpec(theta=1e4), size, dtype, torch.device("cpu"))
    slot_T = torch.randperm(SLOTS - 1, generator=rng)[:rows] + 1
    return qkv_TAD, spec(torch.arange(rows) * 7 + 3), slot_T


def by_one(qkv_TAD: Tensor, by: rope.Turn, slot_T: Tensor, kv: int) -> tuple[Tensor, Keys]:
    size = qkv_TAD.shape[2]
    pool = Keys(*(torch.full((SLOTS, kv, size), -5.0, dtype=qkv_TAD.dtype) for _ in "kv"))
    pool = Keys(pool.k_SKD.to(DEVICE), pool.v_SKD.to(DEVICE))
    angles = (by.cos_T1D.to(DEVICE), by.sin_T1D.to(DEVICE))
    q_THD = turn_write(qkv_TAD.to(DEVICE), angles, pool, slot_T.to(DEVICE))
    return q_THD.cpu(), Keys(pool.k_SKD.cpu(), pool.v_SKD.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "kv", "size"), [(1, 1, 1, 16), (5, 9, 3, 64), (7, 32, 8, 128), (3, 5, 5, 32)]
)
def test_one_launch_leaves_what_two_references_leave(
    rows: int, heads: int, kv: int, size: int, dtype: torch.dtype
) -> None:
    qkv_TAD, by, slot_T = made(rows, heads, kv, size, dtype)
    q_THD, pool = by_one(qkv_TAD, by, slot_T, kv)
    told_THD, told = by_two(qkv_TAD, by, slot_T, kv)
    near = {"atol": 4 * torch.finfo(dtype).eps, "rtol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(q_THD, told_THD, **near)
    torch.testing.assert_close(pool.k_SKD[1:], told.k_SKD[1:], **near)
    assert torch.equal(pool.v_SKD[1:], told.v_SKD[1:])
    untouched = sorted(set(range(SLOTS)) - set(slot_T.tolist()))
    assert (pool.k_SKD[untouched] == -5).all() and (pool.v_SKD[untouched] == -5).all()


def test_the_check_can_fail() -> None:
    qkv_TAD, by, slot_T = made(5, 4, 2, 16, torch.float32)
    q_THD, pool = by_one(qkv_TAD, by, slot_T, 2)
    back = rope.Turn(by.cos_T1D, -by.sin_T1D)
    told_THD, told = by_two(qkv_TAD, back, slot_T.flip(0), 2)
    assert (q_THD - told_THD).abs().max() > 1e-2
    assert (pool.k_SKD - told.k_SKD).abs().max() > 1e-2
    assert not torch.equal(pool.v_SKD, told.v_SKD)
