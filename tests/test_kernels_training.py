"""The kernels of training agree with their torch references, and those with autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.kernels import (
    log_probs,
    log_probs_triton,
    own_keys,
    own_keys_triton,
    soft_cross_entropy,
    soft_cross_entropy_triton,
)
from furcate.kernels.own_keys import Merged, Own
from furcate.kernels.soft_cross_entropy import Objective

pytestmark = MARKS
LK = Objective("lk", 0.9, 2.0)


def _rows(rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    draft_ND = torch.randn(rows, columns, generator=rng) * 3
    log_p_ND = (torch.randn(rows, columns, generator=rng) * 3).log_softmax(1) - 0.1
    bias_D = torch.rand(columns, generator=rng).mul(3).floor()
    weight_N = torch.rand(rows, generator=rng)
    weight_N[::3] = 0
    return tuple(x.to(DEVICE) for x in (draft_ND, log_p_ND, bias_D, weight_N))  # type: ignore[return-value]


@pytest.mark.parametrize("objective", [Objective(), LK], ids=["soft_ce", "lk"])
def test_the_slope_is_that_of_autograd(objective: Objective) -> None:
    draft_ND, log_p_ND, bias_D, weight_N = (x.double().cpu() for x in _rows(7, 33))
    leaf_ND = draft_ND.clone().requires_grad_()
    log_q_ND = (leaf_ND + bias_D).log_softmax(1)
    p_ND = (log_p_ND + bias_D).exp()
    loss_N = -(p_ND * log_q_ND).sum(1)
    overlap_N = torch.minimum(p_ND, log_q_ND.exp()).sum(1)
    part_N = objective.kl_scale * (-objective.kl_decay * overlap_N.detach()).exp()
    wanted_N = (
        loss_N if objective.kind == "soft_ce" else part_N * loss_N + (1 - part_N) * (1 - overlap_N)
    )
    (wanted_N * weight_N).sum().backward()
    scores = soft_cross_entropy.soft_cross_entropy(draft_ND, log_p_ND, bias_D, weight_N, objective)
    assert leaf_ND.grad is not None
    assert torch.allclose(draft_ND, leaf_ND.grad, atol=1e-13)
    assert torch.allclose(scores.loss_N, loss_N.detach())
    assert torch.allclose(scores.overlap_N, overlap_N.detach())


@pytest.mark.parametrize("objective", [Objective(), LK], ids=["soft_ce", "lk"])
@pytest.mark.parametrize("columns", [1, 63, 4096 + 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_loss_is_the_reference(
    objective: Objective, columns: int, dtype: torch.dtype
) -> None:
    draft_ND, log_p_ND, bias_D, weight_N = _rows(5, columns)
    draft_ND, log_p_ND = draft_ND.to(dtype), log_p_ND.to(dtype)
    slope_ND = draft_ND.clone()
    wanted = soft_cross_entropy.soft_cross_entropy(slope_ND, log_p_ND, bias_D, weight_N, objective)
    found = soft_cross_entropy_triton.soft_cross_entropy(
        draft_ND, log_p_ND, bias_D, weight_N, objective
    )
    # sums of float32 in another order; bfloat16 slopes may be rounded to a neighbour
    step = 2e-6 if dtype == torch.float32 else 2**-7
    assert torch.allclose(draft_ND.float(), slope_ND.float(), atol=2e-6, rtol=step)
    assert torch.allclose(found.loss_N, wanted.loss_N, rtol=1e-5, atol=1e-5)
    assert torch.allclose(found.overlap_N, wanted.overlap_N, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.agree_N, wanted.agree_N)


def test_the_comparison_of_losses_can_fail() -> None:
    draft_ND, log_p_ND, bias_D, weight_N = _rows(5, 63)
    with_bias_ND, without_ND = draft_ND.clone(), draft_ND.clone()
    for slope_ND, bias in ((with_bias_ND, bias_D), (without_ND, torch.zeros_like(bias_D))):
        soft_cross_entropy_triton.soft_cross_entropy(
            slope_ND, log_p_ND, bias, weight_N, Objective()
        )
    assert not torch.allclose(with_bias_ND, without_ND, atol=1e-2)


@pytest.mark.parametrize(("vocab", "columns"), [(1, 1), (63, 5), (4096 + 31, 4096 + 3)])
def test_log_probs_in_triton_are_the_reference(vocab: int, columns: int) -> None:
    rng = torch.Generator().manual_seed(0)
    score_NV = (torch.randn(3, vocab, generator=rng) * 9).to(DEVICE)
    column_D = torch.randperm(vocab, generator=rng)[:columns].sort().values.to(DEVICE)
    wanted = log_probs.log_probs(score_NV, column_D, torch.float32)
    found = log_probs_triton.log_probs(score_NV, column_D, torch.float32)
    assert torch.allclose(found, wanted, atol=2e-5)
    assert not torch.allclose(found, score_NV.index_select(1, column_D), atol=1e-2) or vocab == 1


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("heads", "kv", "rows"), [(6, 2, 37), (2, 2, 1)])
def test_own_keys_in_triton_are_the_reference(heads: int, kv: int, rows: int, count: int) -> None:
    rng = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(DEVICE)

    size = 16
    q_THD = drawn(rows, heads + kv, size)[:, :heads]  # rows of a wider tensor, as in a layer
    own = Own(drawn(count, rows, kv, size), drawn(count, rows, kv, size))
    out_THD, lse_HT = drawn(rows, heads, size), drawn(heads, rows)
    wanted, found = (
        module.merge_own(q_THD, own, out_THD, lse_HT) for module in (own_keys, own_keys_triton)
    )
    assert torch.allclose(found[0], wanted[0], atol=1e-5)
    assert torch.allclose(found[1], wanted[1], atol=1e-5)
    assert not torch.allclose(found[0], out_THD, atol=1e-2)
    grad_THD, merged = drawn(rows, heads, size), Merged(q_THD, *wanted)
    first = drawn(rows, heads, size)
    dq_wanted, dq_found = first.clone(), first.clone()
    slopes = own_keys.own_gradients(grad_THD, merged, own, dq_wanted)
    other = own_keys_triton.own_gradients(grad_THD, merged, own, dq_found)
    assert torch.allclose(dq_found, dq_wanted, atol=2e-5)
    assert torch.allclose(other.k_JTKD, slopes.k_JTKD, atol=2e-5)
    assert torch.allclose(other.v_JTKD, slopes.v_JTKD, atol=2e-5)
    assert not torch.allclose(dq_found, first, atol=1e-2)
