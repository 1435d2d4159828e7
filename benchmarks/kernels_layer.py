"""Rows of `kernels_gpu.py`: the products of a layer in every way there is, norms, turns and writes.

Legend: T rows, C hidden size, H heads, K key heads, D head size, A = H + 2 K.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from itertools import cycle
from typing import Any

import torch
from gpu_cases import distance, poisoned
from gpu_timing import buffers_for, timed
from kernels_bench import Bench
from torch import Tensor

from furcate.kernels import tree_attention as attending
from furcate.kernels.tree_attention import SCRATCH, Keys
from furcate.models import blocks
from furcate.models.blocks import Blocks, Stream
from furcate.models.linear import Linear
from furcate.models.norm import RmsNorm
from furcate.models.rope import Rope, turn
from furcate.models.spec import DecoderSpec

__all__ = ["PRODUCTS", "multiplying", "norming", "random_linear", "sides", "turning", "ways"]

Row = dict[str, Any]
SLOTS = 4096


def ways(bench: Bench) -> dict[str, Blocks]:
    """All ways to compute a block on this device."""
    if bench.device.type != "cuda":
        return {"torch": blocks.TORCH}
    on_gpu = import_module("furcate.models.blocks_triton")  # needs triton
    return {"torch": blocks.TORCH, "triton": on_gpu.TRITON, "invariant": on_gpu.INVARIANT}


def _qkv(way: Blocks, x: Tensor, norm: RmsNorm, by: Linear) -> Tensor:
    return way.norm_linear(Stream(x), norm, by)[1]


def _gate_up(way: Blocks, x: Tensor, norm: RmsNorm, by: Linear) -> Tensor:
    return way.gate_linear(Stream(x), norm, by)[1]


def _add(way: Blocks, x: Tensor, norm: RmsNorm, by: Linear) -> Tensor:
    stream = way.linear_add(x, by, x.new_ones(len(x), len(norm.weight)))
    return stream.whole()


def _scores(way: Blocks, x: Tensor, norm: RmsNorm, by: Linear) -> Tensor:
    return way.linear(x, by)


Product = Callable[[Blocks, Tensor, RmsNorm, Linear], Tensor]
PRODUCTS: dict[str, Product] = {
    "norm, qkv": _qkv,
    "attention out, sum": _add,
    "norm, gate, up, SwiGLU": _gate_up,
    "down, sum": _add,
    "scores": _scores,
}


def sides(spec: DecoderSpec, name: str) -> tuple[int, int]:
    """(inputs, outputs) of one of `PRODUCTS`."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    wide = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return {
        "norm, qkv": (hidden, wide),
        "attention out, sum": (spec.num_heads * spec.head_dim, hidden),
        "norm, gate, up, SwiGLU": (hidden, 2 * inner),
        "down, sum": (inner, hidden),
        "scores": (hidden, spec.vocab_size),
    }[name]


def multiplying(bench: Bench, spec: DecoderSpec, name: str, rows: int, way: str) -> Row:
    """A product and what stands around it; its weight comes from memory each time."""
    inputs, outputs = sides(spec, name)
    like = torch.empty(0, dtype=bench.dtype, device=bench.device)
    size = inputs * outputs * like.itemsize
    count = buffers_for(size, bench.device)
    layers = [random_linear(inputs, outputs, like) for _ in range(count)]
    norm = _norm(spec, like)
    x_TI = bench.random(rows, inputs)
    product, by = PRODUCTS[name], ways(bench)[way]
    with poisoned():
        found = product(by, x_TI, norm, layers[0])
    exact = like.float()
    twin = random_linear(inputs, outputs, exact)
    twin.weight.copy_(layers[0].weight)
    expected = product(blocks.TORCH, x_TI.float(), _norm(spec, exact), twin)
    turns = cycle(layers)
    timing = timed(lambda: product(by, x_TI, norm, next(turns)), bench.device, turns=len(layers))
    moved = size + x_TI.nbytes + found.nbytes
    return bench.row(
        distance(found, expected), timing, moved=moved, work=2 * rows * inputs * outputs
    )


def norming(bench: Bench, spec: DecoderSpec, rows: int, way: str) -> Row:
    """The norm of a sum."""
    like = torch.empty(0, dtype=bench.dtype, device=bench.device)
    norm, by = _norm(spec, like), ways(bench)[way]
    x, more = (bench.random(rows, spec.hidden_size) for _ in "xm")
    with poisoned():
        found = by.norm(Stream(x, more), norm)[1]
    exact = _norm(spec, like.float())
    expected = blocks.TORCH.norm(Stream(x.float(), more.float()), exact)[1]
    timing = timed(lambda: by.norm(Stream(x, more), norm), bench.device)
    return bench.row(distance(found, expected), timing, moved=4 * x.nbytes)


def turning(bench: Bench, spec: DecoderSpec, rows: int) -> Row:
    """Queries and keys turned, keys and values written: of one layer."""
    turn_write = bench.kernels.turn_write
    if turn_write is None:
        return {}
    kv, size = spec.num_kv_heads, spec.head_dim
    wide = spec.num_heads + 2 * kv
    ours, theirs = (
        Keys(*(torch.zeros(SLOTS, kv, size, dtype=bench.dtype, device=bench.device) for _ in "kv"))
        for _ in "ab"
    )
    qkv_TAD = bench.random(rows, wide, size)
    slot_T = torch.randperm(SLOTS - 1, device=bench.device)[:rows] + 1
    rope = Rope(spec.rope, size, bench.dtype, bench.device)
    by = rope(torch.randint(0, 4000, (rows,), device=bench.device))
    angles = (by.cos_T1D, by.sin_T1D)
    with poisoned():
        q_THD = turn_write(qkv_TAD, angles, ours, slot_T)
    turned = turn(qkv_TAD[:, :-kv].float(), type(by)(by.cos_T1D.float(), by.sin_T1D.float()))
    k_TKD = turned[:, spec.num_heads :].to(bench.dtype)
    attending.write(theirs, slot_T, k_TKD, qkv_TAD[:, -kv:])
    error = max(
        distance(q_THD, turned[:, : spec.num_heads]),
        *(
            distance(a[SCRATCH + 1 :], b[SCRATCH + 1 :])
            for a, b in ((ours.k_SKD, theirs.k_SKD), (ours.v_SKD, theirs.v_SKD))
        ),
    )
    timing = timed(lambda: turn_write(qkv_TAD, angles, ours, slot_T), bench.device)
    return bench.row(error, timing, moved=2 * qkv_TAD.nbytes)


def random_linear(inputs: int, outputs: int, like: Tensor) -> Linear:
    """Its products are as large as what they read."""
    made = Linear(inputs, outputs, bias=False, like=like).requires_grad_(False)
    made.weight.normal_(0, inputs**-0.5)
    return made


def _norm(spec: DecoderSpec, like: Tensor) -> RmsNorm:
    norm = RmsNorm(spec.hidden_size, spec.rms_norm_eps, like=like).requires_grad_(False)
    norm.weight.fill_(1.0)
    return norm
