"""Rows side by side in Triton: the torch reference's, on poison; without a norm bit for bit.

Legend: B requests, R rows of each, S rows to pick from, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from poison import unwritten_numbers_are_poison  # noqa: F401 (a fixture)
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.kernels import beside as reference
from furcate.kernels.beside import Norm, Part, Rows
from furcate.kernels.beside_triton import beside

pytestmark = [*MARKS, pytest.mark.usefixtures("unwritten_numbers_are_poison")]

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
        told, last = reference.beside(parts)
        heard, copied = beside(parts)
        torch.testing.assert_close(heard, told, rtol=1e-5, atol=1e-5)
        assert torch.equal(copied, last)


@pytest.mark.parametrize("dtype", NEAR)
def test_what_is_not_normed_is_copied_bit_for_bit(dtype: torch.dtype) -> None:
    parts = [part(9, (2, 3), seed=i, normed=False, dtype=dtype) for i in range(3)]
    assert torch.equal(beside(parts)[0], reference.beside(parts)[0])


@pytest.mark.parametrize("dtype", NEAR)
def test_norms_are_rounded_once(dtype: torch.dtype) -> None:
    parts = [part(33, (2, 3), seed=i, dtype=dtype) for i in range(2)]
    near = {"rtol": NEAR[dtype], "atol": NEAR[dtype]}
    torch.testing.assert_close(beside(parts)[0], reference.beside(parts)[0], **near)


def test_the_comparison_can_fail() -> None:
    parts = [part(8, (2, 3), seed=0), part(8, (2, 3), seed=1, step=4)]
    rows, norm = parts[1]
    shared = [parts[0], (Rows(rows.x_SC, rows.number_BR), norm)]
    assert not torch.equal(beside(parts)[1], reference.beside(shared)[1])
    swapped = [(parts[0][0], norm), parts[1]]
    assert not torch.allclose(beside(parts)[0], reference.beside(swapped)[0], rtol=1e-2)
