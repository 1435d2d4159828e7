"""The turn, the gate and the norm as Triton kernels equal their torch twins, and their slopes."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, MARKS

from furcate.models import gate, gate_triton, norm, norm_triton, rope, rope_triton
from furcate.models.spec import RopeSpec

pytestmark = MARKS

# the interpreter cuts bfloat16 off instead of rounding it
HALVES = [torch.float16] if DEVICE.type == "cpu" else [torch.float16, torch.bfloat16]


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


@pytest.mark.parametrize(("rows", "size"), [(1, 5), (4, 48), (3, 576), (2, 4096)])
def test_a_sum_and_its_norm_are_those_of_the_reference(rows: int, size: int) -> None:
    rng = torch.Generator().manual_seed(size)
    x, more = (torch.randn(rows, 2 * size, generator=rng, dtype=torch.float64) for _ in "xm")
    weight = torch.randn(size, generator=rng, dtype=torch.float64)
    x, more = x[:, size:], more[:, :size]  # rows may lie apart
    exact, rounded = norm_by(weight), norm_by(weight.float().to(DEVICE))
    wanted = norm.add_norm(x, more, exact)
    given, added = (y.float().to(DEVICE) for y in (x, more))
    found = norm_triton.add_norm(given, added, rounded)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, atol=1e-5, rtol=1e-5)
    wrong = norm.add_norm(x, -more, exact)
    assert (found[1].cpu().double() - wrong[1]).abs().max() > 1e-2, "and the comparison can fail"
    total, normed = norm_triton.add_norm(given, None, rounded)
    assert torch.equal(total, given)
    torch.testing.assert_close(normed.cpu().double(), exact(x), atol=1e-5, rtol=1e-5)


def norm_by(weight: torch.Tensor) -> norm.RmsNorm:
    made = norm.RmsNorm(len(weight), 1e-5, like=weight).requires_grad_(False)
    made.weight.copy_(weight)
    return made


def test_heads_are_normed_where_they_lie() -> None:
    rng = torch.Generator().manual_seed(3)
    wide = torch.randn(5, 4, 16, generator=rng).to(DEVICE)
    by = norm_by(torch.randn(16, generator=rng).to(DEVICE))
    _, found = norm_triton.add_norm(wide[:, 1:3], None, by)
    torch.testing.assert_close(found, by(wide[:, 1:3].contiguous()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_norm_is_that_of_the_rounded_sum(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(1)
    x, more = (torch.randn(3, 64, generator=rng).to(dtype) for _ in "xm")
    by = norm_by(torch.ones(64, dtype=dtype, device=DEVICE))
    total, normed = norm_triton.add_norm(x.to(DEVICE), more.to(DEVICE), by)
    assert torch.equal(total.cpu(), x + more)
    exact = norm_by(torch.ones(64).double())((x + more).double())
    torch.testing.assert_close(
        normed.cpu().double(), exact, atol=0, rtol=2 * torch.finfo(dtype).eps
    )
