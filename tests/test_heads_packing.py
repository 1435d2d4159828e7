"""Matrices of heads laid out for the CPU: the same products, in bfloat16 where the CPU has it."""

from __future__ import annotations

import pytest
import torch

from furcate.heads.packing import pack
from furcate.models.linear import Linear, can_pack, can_pack_bfloat16


def layer(bias: bool, dtype: torch.dtype = torch.float32) -> Linear:
    made = Linear(96, 40, bias=bias, like=torch.empty(0, dtype=dtype))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=random, dtype=dtype))
    return made


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_products_are_the_plain_ones_but_for_rounding(bias: bool, rows: int) -> None:
    plain, packed = layer(bias), layer(bias)
    with torch.no_grad():  # a head is stored in bfloat16: its weights lose nothing
        for one in (plain, packed):
            one.weight.copy_(one.weight.bfloat16())
    assert can_pack(packed.weight)
    pack(packed)
    assert packed.packed is not None
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        want, got = plain(x), packed(x)
    assert got.dtype == torch.float32
    halves = can_pack_bfloat16(plain.weight) and rows > 1
    assert (got - want).abs().max() <= (2**-7 * want.abs().max() if halves else 1e-4)
    assert (packed.packed.dtype == torch.bfloat16) == can_pack_bfloat16(plain.weight)


def test_what_is_not_float32_stays_as_it_is() -> None:
    made = layer(True, torch.float64)
    pack(made)
    assert made.packed is None and not can_pack_bfloat16(made.weight)
