"""The rotary turn and the gate as Triton kernels equal their torch twins, slopes too."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, MARKS

from furcate.models import gate, gate_triton, rope, rope_triton
from furcate.models.spec import RopeSpec

pytestmark = MARKS


@pytest.mark.parametrize(
    ("rows", "heads", "size"), [(1, 1, 2), (7, 3, 16), (33, 12, 64), (5, 2, 24)]
)
def test_the_turn_and_its_slope_are_those_of_the_reference(
    rows: int, heads: int, size: int
) -> None:
    rng = torch.Generator().manual_seed(rows)
    wide = torch.randn(rows, heads + 2, size, generator=rng, dtype=torch.float64)
    upstream = torch.randn(rows, heads, size, generator=rng, dtype=torch.float64)
    spec = rope.Rope(RopeSpec(theta=1e4), size, torch.float64, torch.device("cpu"))
    by = spec(torch.arange(rows) * 3)
    exact = wide.clone().requires_grad_()
    wanted = rope.turn(exact[:, 1:-1], by)
    wanted.backward(upstream)
    given = wide.float().to(DEVICE).requires_grad_()
    cos, sin = (x.float().to(DEVICE) for x in (by.cos_T1D, by.sin_T1D))
    found = rope_triton.turn(given[:, 1:-1], cos, sin)
    found.backward(upstream.float().to(DEVICE))
    assert given.grad is not None and exact.grad is not None
    torch.testing.assert_close(found.cpu().double(), wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(given.grad.cpu().double(), exact.grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (5, 48), (3, 1536)])
def test_the_gate_and_its_slope_are_those_of_the_reference(rows: int, inner: int) -> None:
    rng = torch.Generator().manual_seed(inner)
    both = 3 * torch.randn(rows, 2 * inner, generator=rng, dtype=torch.float64)
    upstream = torch.randn(rows, inner, generator=rng, dtype=torch.float64)
    exact = both.clone().requires_grad_()
    wanted = gate.gated(exact)
    wanted.backward(upstream)
    given = both.float().to(DEVICE).requires_grad_()
    found = gate_triton.gated(given)
    found.backward(upstream.float().to(DEVICE))
    assert given.grad is not None and exact.grad is not None
    torch.testing.assert_close(found.cpu().double(), wanted, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(given.grad.cpu().double(), exact.grad, atol=2e-5, rtol=1e-5)
