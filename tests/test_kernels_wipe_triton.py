"""Wiping pages: by the reference and in Triton, all of them and nothing else.

Legend: L layers, S slots, X pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from kv_cases import bits
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.kernels.wipe import wipe
from furcate.kernels.wipe_triton import wipe as on_device

pytestmark = MARKS

Wipe = Callable[[Sequence[Tensor], Tensor, int, Sequence[Tensor]], None]
BOTH = pytest.mark.parametrize("wiping", [wipe, on_device], ids=["torch", "triton"])


def pool(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bits, NaN among them."""
    rng = torch.Generator().manual_seed(seed)
    raw = torch.randint(-(2**62), 2**62, shape, generator=rng)
    return raw.view(dtype)[..., : shape[-1]].contiguous().to(DEVICE)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("page_size", "slot"), [(16, (2, 8)), (32, (3, 64)), (4, (5,)), (1, (7,))])
def test_these_pages_are_zero_and_the_others_untouched(
    wiping: Wipe, dtype: torch.dtype, page_size: int, slot: tuple[int, ...]
) -> None:
    pools = [pool(i, (layers, 9 * page_size, *slot), dtype) for i, layers in enumerate((3, 1))]
    before = [x.clone() for x in pools]
    pages = [7, 2, 3, -1, 2, -1]
    wiping(pools, torch.tensor(pages, device=DEVICE), page_size, ())
    for now, old in zip(pools, before, strict=True):
        for page in range(9):
            own = slice(page * page_size, (page + 1) * page_size)
            if page in (7, 2, 3):
                assert not now[:, own].view(torch.uint8).any()
            elif page:  # page 0 is scratch, which pads stand for
                assert torch.equal(bits(now[:, own]), bits(old[:, own]))


@BOTH
def test_buffers_are_wiped_whole_and_an_empty_list_wipes_nothing(wiping: Wipe) -> None:
    kept = pool(1, (2, 8, 4), torch.float32)
    before = kept.clone()
    wide = pool(2, (6, 10), torch.float32)
    strided = wide[:, 2:9]
    flags = torch.ones(5, dtype=torch.bool, device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    wiping([kept], none, 4, [strided, flags])
    assert torch.equal(bits(kept), bits(before))
    assert not strided.any()
    assert not flags.any()
    assert bits(wide[:, 9:]).any() and bits(wide[:, :2]).any()
