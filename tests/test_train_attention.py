"""Unrolled steps: attention against a dense softmax, heads against their run-time recursion."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny_engine import VOCAB, decoder
from tiny_heads import RECURRENT, network
from torch import Tensor

from furcate.kernels.packed_attention import Packing
from furcate.models.causal import causal_attend
from furcate.train.attention import Unrolled, packed_attend
from furcate.train.batches import Batch
from furcate.train.unroll import unroll

CPU = torch.device("cpu")
BOUNDS = (0, 5, 6, 13)  # conversations of odd lengths, one of a single row
HEADS, KV, SIZE, STEPS = 4, 2, 3, 3


def _drawn(*shape: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def _inputs() -> list[Tensor]:
    rows = BOUNDS[-1]
    shapes = [(rows, HEADS, SIZE), (rows, KV, SIZE), (rows, KV, SIZE)] * STEPS
    return [_drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def _unrolled(*inputs: Tensor) -> tuple[Tensor, ...]:
    attend = Unrolled(Packing.of(BOUNDS, CPU))
    return tuple(attend(0, *inputs[i : i + 3]) for i in range(0, len(inputs), 3))


def _dense(*inputs: Tensor) -> tuple[Tensor, ...]:
    """Row t of step k sees the first step's rows up to t, and steps 2 to k at t: one softmax."""
    rows, group = BOUNDS[-1], HEADS // KV
    talk_T = torch.bucketize(torch.arange(rows), torch.tensor(BOUNDS[1:]), right=True)
    at_T = torch.arange(rows)
    first_TT = (talk_T[:, None] == talk_T) & (at_T <= at_T[:, None])
    own_TT = at_T == at_T[:, None]
    k, v = ([x.repeat_interleave(group, 1) for x in inputs[i::3]] for i in (1, 2))
    found = []
    for step, q_THD in enumerate(inputs[0::3]):
        seen_TS = torch.cat([first_TT] + [own_TT] * step, 1)
        keys, values = (torch.cat(x[: step + 1]) for x in (k, v))
        score_HTS = torch.einsum("thd,shd->hts", q_THD, keys) * SIZE**-0.5
        weight_HTS = score_HTS.masked_fill(~seen_TS, -torch.inf).softmax(-1)
        found.append(torch.einsum("hts,shd->thd", weight_HTS, values))
    return tuple(found)


def test_every_step_sees_what_a_dense_softmax_says() -> None:
    inputs = _inputs()
    for found, wanted in zip(_unrolled(*inputs), _dense(*inputs), strict=True):
        assert torch.allclose(found, wanted, atol=1e-12)


def test_gradients_are_those_of_the_dense_softmax() -> None:
    inputs = _inputs()
    slopes = [_drawn(*x.shape, seed=90 + i) for i, x in enumerate(_dense(*inputs))]
    found, wanted = (
        torch.autograd.grad(function(*inputs), inputs, slopes) for function in (_unrolled, _dense)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    assert torch.autograd.gradcheck(_unrolled, _inputs(), fast_mode=True)


def test_the_gradient_check_can_fail() -> None:
    """With the first step's own normaliser instead of the joint one the slopes are wrong."""
    inputs = _inputs()
    alone = Unrolled(Packing.of(BOUNDS, CPU))
    apart = tuple(alone(step, *inputs[3 * step : 3 * step + 3]) for step in range(STEPS))
    found, wanted = (
        torch.autograd.grad([out.sum() for out in outs], inputs)
        for outs in (apart, _dense(*inputs))
    )
    assert not torch.allclose(found[3], wanted[3], atol=1e-3)


def test_packed_attention_is_causal_attention_of_each_conversation() -> None:
    q, k, v = _inputs()[:3]
    found = packed_attend(Packing.of(BOUNDS, CPU))(0, q, k, v)
    for a, b in pairwise(BOUNDS):
        assert torch.allclose(found[a:b], causal_attend(0, q[a:b], k[a:b], v[a:b]), atol=1e-12)


def _batch(steps: int) -> Batch:
    rng = torch.Generator().manual_seed(4)
    tokens_TA = torch.randint(0, VOCAB, (BOUNDS[-1] + steps,), generator=rng)
    begin_T = torch.tensor([a for a, b in pairwise(BOUNDS) for _ in range(a, b)])
    at_T = torch.arange(BOUNDS[-1])
    return Batch(tokens_TA, at_T - begin_T, Packing.of(BOUNDS, CPU), at_T, begin_T)


def _states(head: Any, batch: Batch) -> Tensor:
    tokens_T = batch.tokens_TA[: BOUNDS[-1]]
    attend = packed_attend(batch.packing)
    return decoder().states(tokens_T, batch.positions_T, attend, head.layers).features_TF


def _as_at_run_time(head: Any, batch: Batch, features_TF: Tensor, talk: int, root: int) -> Tensor:
    """Finals of a chain of true tokens below position `root` of one conversation, step by step.

    Slot p holds token p and the state of p - 1. Verified slots are computed in one pass, drafted
    ones each with its parent's output, seeing all slots before them.
    """
    a, b = BOUNDS[talk : talk + 2]
    tokens, state_TC = batch.tokens_TA[a:b], head.fuse(features_TF[a:b])
    kept: dict[int, list[list[Tensor]]] = {}

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        entries = kept.setdefault(layer, [])
        entries.append([k_TKD, v_TKD])
        if len(entries) == 1:
            return causal_attend(layer, q_THD, k_TKD, v_TKD)
        k, v = (
            torch.cat(x).repeat_interleave(q_THD.shape[1] // k_TKD.shape[1], 1)
            for x in zip(*entries, strict=True)
        )
        score_HTS = torch.einsum("thd,shd->hts", q_THD, k) * q_THD.shape[2] ** -0.5
        return torch.einsum("hts,shd->thd", score_HTS.softmax(-1), v)

    slots = torch.arange(1, root + 1)
    out_TC = head(tokens[slots], state_TC[slots - 1], slots, attend)
    finals = [head.final(out_TC[-1:])]
    for slot in range(root + 1, b - a):
        out_TC = head(tokens[slot : slot + 1], out_TC[-1:], torch.tensor([slot]), attend)
        finals.append(head.final(out_TC))
    return torch.cat(finals)


@pytest.mark.parametrize("kind", RECURRENT)
def test_unrolled_steps_are_what_a_draft_computes_at_run_time(kind: str) -> None:
    head, steps = network(kind), 4
    batch = _batch(steps)
    features_TF = _states(head, batch)
    unrolled = list(unroll(head, features_TF, batch, steps))
    for talk, root in ((0, 1), (0, 2), (2, 1), (2, 3)):
        chain = _as_at_run_time(head, batch, features_TF, talk, root)
        for step, final_NC in zip(range(1, steps + 1), chain, strict=False):
            at = BOUNDS[talk] + root + step - 1  # the position whose next token is guessed
            assert int(batch.rows(step)[at]) == BOUNDS[talk] + root - 1
            assert torch.allclose(unrolled[step - 1][at], final_NC, atol=1e-10)


def test_medusas_steps_are_its_heads() -> None:
    head = network("medusa")
    batch = _batch(head.depth)
    features_TF = _states(head, batch)
    hidden_KTC = head(features_TF)
    for step, final_NC in enumerate(unroll(head, features_TF, batch, head.depth), start=1):
        row_N = batch.rows(step)
        there_N = row_N < BOUNDS[-1]
        assert torch.allclose(final_NC[there_N], hidden_KTC[step - 1][row_N[there_N]], atol=1e-12)


def test_no_conversation_learns_from_another() -> None:
    head, steps = network("eagle3"), 3
    batch = _batch(steps)
    features_TF = _states(head, batch).clone().requires_grad_()
    finals = list(unroll(head, features_TF, batch, steps))
    second = slice(BOUNDS[2], BOUNDS[3])
    (slope_TF,) = torch.autograd.grad(sum(x[second].sum() for x in finals), features_TF)
    assert slope_TF[: BOUNDS[2]].abs().max() == 0
    assert slope_TF[second].abs().max() > 0


@pytest.mark.gpu
def test_flash_kernels_give_the_slopes_of_float64() -> None:
    """Grouped heads, ragged conversations, six steps: bfloat16 errors stay below 1 % in norm."""
    bounds, heads, kv, size = (0, 63, 64, 300, 511), 9, 3, 64
    rows = bounds[-1]
    shapes = [(rows, heads, size), (rows, kv, size), (rows, kv, size)] * 6
    exact = [_drawn(*s, seed=i).bfloat16().double().requires_grad_() for i, s in enumerate(shapes)]
    short = [x.detach().bfloat16().cuda().requires_grad_() for x in exact]
    slopes = [_drawn(*shapes[0], seed=70 + i).bfloat16() for i in range(6)]
    found: list[list[Tensor]] = []
    for inputs in (exact, short):
        packing = Packing.of(bounds, inputs[0].device)
        attend = Unrolled(packing)
        outs = [attend(0, *inputs[i : i + 3]) for i in range(0, 18, 3)]
        given = [slope.to(inputs[0]) for slope in slopes]
        found.append(
            [x.detach().double().cpu() for x in (*outs, *torch.autograd.grad(outs, inputs, given))]
        )
    for wanted, ours in zip(*found, strict=True):
        assert (ours - wanted).norm() < 1e-2 * wanted.norm()
