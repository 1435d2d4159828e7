"""Keys and values are written where the torch twin writes them, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.kernels.kv_write_triton import write
from furcate.kernels.tree_attention import Keys
from furcate.kernels.tree_attention import write as told

pytestmark = MARKS


def apart(rows: int, kv: int, size: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values as parts of one projection: rows do not follow one another."""
    rng = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, 3 * kv, size, generator=rng).to(dtype)
    return wide[:, kv : 2 * kv], wide[:, 2 * kv :]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "kv", "size"), [(1, 1, 16), (5, 3, 64), (7, 8, 128), (3, 40, 64)])
def test_rows_lie_where_the_twin_puts_them(
    rows: int, kv: int, size: int, dtype: torch.dtype
) -> None:
    k_TKD, v_TKD = apart(rows, kv, size, dtype, rows)
    slot_T = torch.randperm(40, generator=torch.Generator().manual_seed(rows))[:rows] + 1
    pools = [torch.full((41, kv, size), -5.0, dtype=dtype) for _ in range(4)]
    told(Keys(pools[0], pools[1]), slot_T, k_TKD, v_TKD)
    there = Keys(pools[2].to(DEVICE), pools[3].to(DEVICE))
    write(there, slot_T.to(DEVICE), k_TKD.to(DEVICE), v_TKD.to(DEVICE))
    assert torch.equal(there.k_SKD.cpu()[1:], pools[0][1:])
    assert torch.equal(there.v_SKD.cpu()[1:], pools[1][1:])
    untouched = sorted(set(range(41)) - set(slot_T.tolist()))
    assert (there.k_SKD.cpu()[untouched] == -5).all()


def test_the_check_can_fail() -> None:
    k_TKD, v_TKD = apart(2, 1, 16, torch.float32, 0)
    pools = [torch.zeros(4, 1, 16) for _ in range(4)]
    told(Keys(pools[0], pools[1]), torch.tensor([1, 2]), k_TKD, v_TKD)
    there = Keys(pools[2].to(DEVICE), pools[3].to(DEVICE))
    write(there, torch.tensor([2, 1], device=DEVICE), k_TKD.to(DEVICE), v_TKD.to(DEVICE))
    assert not torch.equal(there.k_SKD.cpu(), pools[0])
