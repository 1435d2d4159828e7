"""Rows side by side in Triton: the torch reference's, on poison; without a norm bit for bit, and
angles to an ulp.

Legend: B requests, R rows of each, S rows to pick from, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from poison import unwritten_numbers_are_poison  # noqa: F401 (a fixture)
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.kernels import beside as reference
from furcate.kernels.beside import Angles, Norm, Part, Rows
from furcate.kernels.beside_triton import beside
from furcate.models.rope import Rope
from furcate.models.spec import RopeSpec

pytestmark = [*MARKS, pytest.mark.usefixtures("unwritten_numbers_are_poison")]

YARN = RopeSpec(1e4, "yarn", factor=4.0, original_max_position=32, attention_factor=1.3)
NEAR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Scale:
    weight: Tensor
    eps: float = 1e-5


def part(
    size: int,
    shape: tuple[int, int],
    *,
    seed: int,
    step: int = 0,
    normed: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Part:
    """Rows of a matrix wider than what is read, so that rows do not follow one another."""
    rng = torch.Generator().manual_seed(seed)
    rows = step * shape[0] or 11
    x_SC = torch.randn(rows, size + 5, generator=rng).to(DEVICE, dtype)[:, 2 : 2 + size]
    number_BR = torch.randint(0, step or rows, shape, generator=rng).to(DEVICE)
    norm: Norm | None = None
    if normed:
        norm = Scale(torch.randn(size, generator=rng).to(DEVICE, dtype))
    return Rows(x_SC, number_BR, step), norm


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 10)])
@pytest.mark.parametrize("sizes", [(8,), (16, 16), (7, 24), (5, 5, 5), (32, 3, 9, 17)])
def test_rows_lie_side_by_side_as_in_torch(shape: tuple[int, int], sizes: tuple[int, ...]) -> None:
    for steps in ((0, 4, 0, 6), (5, 0, 3, 0)):
        parts = [
            part(size, shape, seed=i, step=step, normed=(i + len(sizes)) % 2 == 0)
            for i, (size, step) in enumerate(zip(sizes, steps, strict=False))
        ]
        told, heard = reference.beside(parts), beside(parts)
        torch.testing.assert_close(heard.all_TI, told.all_TI, rtol=1e-5, atol=1e-5)
        assert torch.equal(heard.last_TC, told.last_TC) and heard.angles is None


@pytest.mark.parametrize("dtype", NEAR)
def test_what_is_not_normed_is_copied_bit_for_bit(dtype: torch.dtype) -> None:
    parts = [part(9, (2, 3), seed=i, normed=False, dtype=dtype) for i in range(3)]
    assert torch.equal(beside(parts).all_TI, reference.beside(parts).all_TI)


@pytest.mark.parametrize("size", [2, 10, 64])
@pytest.mark.parametrize("dtype", NEAR)
@pytest.mark.parametrize("sizes", [(8,), (5, 24), (5, 5, 5, 5)])
def test_rows_come_with_their_angles(sizes: tuple[int, ...], dtype: torch.dtype, size: int) -> None:
    shape = (2, 3)
    parts = [part(width, shape, seed=i, dtype=dtype) for i, width in enumerate(sizes)]
    rope = Rope(YARN, size, dtype, torch.device("cpu"))
    position_T = torch.tensor([0, 1, 17, 8191, 131_071, 1_000_003])
    angles = Angles(position_T.to(DEVICE), rope.freq_F.to(DEVICE), 1.3)
    found, by = beside(parts, angles), rope(position_T)
    assert torch.equal(found.all_TI, beside(parts).all_TI), "the parts are as they are without"
    assert found.angles is not None
    near = {torch.float32: 3e-7, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for ours, theirs in zip(found.angles, (by.cos_T1D, by.sin_T1D), strict=True):
        assert ours.dtype == dtype and ours.is_contiguous()
        torch.testing.assert_close(ours.cpu(), theirs, atol=near, rtol=0)


def test_numbers_behind_the_last_row_read_it() -> None:
    shared, own = part(8, (2, 3), seed=0), part(8, (2, 3), seed=1, step=4)
    parts = [(replace(rows, last=2), norm) for rows, norm in (shared, own)]
    told = reference.beside(parts)
    assert not torch.equal(told.last_TC, reference.beside([shared, own]).last_TC)
    assert torch.equal(beside(parts).last_TC, told.last_TC)
    assert torch.equal(beside(parts[:1]).last_TC, reference.beside(parts[:1]).last_TC)


@pytest.mark.parametrize("dtype", NEAR)
def test_norms_are_rounded_once(dtype: torch.dtype) -> None:
    parts = [part(33, (2, 3), seed=i, dtype=dtype) for i in range(2)]
    near = {"rtol": NEAR[dtype], "atol": NEAR[dtype]}
    torch.testing.assert_close(beside(parts).all_TI, reference.beside(parts).all_TI, **near)


def test_the_comparison_can_fail() -> None:
    parts = [part(8, (2, 3), seed=0), part(8, (2, 3), seed=1, step=4)]
    rows, norm = parts[1]
    shared = [parts[0], (Rows(rows.x_SC, rows.number_BR), norm)]
    assert not torch.equal(beside(parts).last_TC, reference.beside(shared).last_TC)
    swapped = [(parts[0][0], norm), parts[1]]
    told = reference.beside(swapped)
    assert not torch.allclose(beside(parts).all_TI, told.all_TI, rtol=1e-2)
