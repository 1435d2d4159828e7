"""Rows of `kernels_gpu.py`: attention over a tree, over a chain, in a draft, and its peers.

Legend: B requests, R rows, N columns of a tree, K key heads, G query heads of each, D head size,
S columns (of a pool: slots), L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from gpu_cases import Case, as_chain, case, distance, poisoned, pool_of
from gpu_timing import buffers_for, side_by_side, timed
from kernels_bench import Bench
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

from furcate.kernels import tree_attention as attending
from furcate.kernels.tree_attention import Keys, Sight, behind
from furcate.models.spec import DecoderSpec

__all__ = ["PEERS", "drafting", "peer", "verifying"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """One layer's queries over a case; keys enough that each call finds its own in memory."""

    bench: Bench
    spec: DecoderSpec
    made: Case
    q_THD: Tensor
    layers: list[Keys]

    @classmethod
    def of(cls, bench: Bench, spec: DecoderSpec, made: Case) -> Asked:
        """Slots that nobody owns are NaN."""
        batch, rows = made.draft.tokens_BR.shape
        shape = (spec.num_kv_heads, spec.head_dim)
        k_SKD, v_SKD = (pool_of(made, shape, bench.dtype) for _ in "kv")
        count = buffers_for(2 * k_SKD.nbytes, bench.device)
        # one pool for all layers, as an engine has it
        k_LSKD, v_LSKD = (x.repeat(count, 1, 1, 1) for x in (k_SKD, v_SKD))
        layers = [Keys(k, v) for k, v in zip(k_LSKD, v_LSKD, strict=True)]
        q_THD = bench.random(batch * rows, spec.num_heads, spec.head_dim)
        return cls(bench, spec, made, q_THD, layers)

    @property
    def group(self) -> int:
        """G."""
        return self.spec.num_heads // self.spec.num_kv_heads

    @property
    def kv_bytes(self) -> int:
        """Of one layer's keys and values of all columns."""
        kept = self.made.places.columns * len(self.made.places.length_B)
        return 2 * kept * self.spec.num_kv_heads * self.spec.head_dim * self.bench.dtype.itemsize

    @property
    def work(self) -> int:
        """Operations of both products, hidden columns of the tree included."""
        columns = self.made.places.columns
        return 4 * len(self.q_THD) * columns * self.spec.num_heads * self.spec.head_dim

    def expected(self, sight: Sight) -> Tensor:
        """In float32, by the reference."""
        keys = Keys(self.layers[0].k_SKD.float(), self.layers[0].v_SKD.float())
        return attending.look(sight, self.group, torch.float32)(self.q_THD.float(), keys)

    def caller(self, sight: Sight) -> tuple[Callable[[], Tensor], float]:
        """(a call with another layer's keys each time, its distance from the reference)."""
        look = self.bench.kernels.look(sight, self.group, self.bench.dtype)
        with poisoned():
            error = distance(look(self.q_THD, self.layers[0]), self.expected(sight))
        turns = cycle(self.layers)
        return lambda: look(self.q_THD, next(turns)), error


def verifying(bench: Bench, spec: DecoderSpec, batch: int, length: int, rows: int) -> Row:
    """The tree's attention beside that of a chain of as many rows."""
    made = case(batch, length, rows, bench.device)
    asked = Asked.of(bench, spec, made)
    chain = as_chain(made)
    (tree_call, tree_error), (chain_call, chain_error) = (
        asked.caller(behind(one.places, one.draft.end_BR, one.draft.live_B))
        for one in (made, chain)
    )
    tree, straight = side_by_side([tree_call, chain_call], bench.device, turns=len(asked.layers))
    moved = asked.kv_bytes + 2 * asked.q_THD.nbytes
    row = bench.row(max(tree_error, chain_error), tree, moved=moved, work=asked.work)
    return {
        **row,
        "kv_gb_per_s": asked.kv_bytes / tree.ms / 1e6,
        "chain_us": straight.ms * 1e3,
        "tree_over_chain": tree.ms / straight.ms,
    }


@dataclass(frozen=True)
class Dense:
    """The same keys as a peer likes them best: gathered beforehand, and not timed."""

    q_BHRD: Tensor
    k_BKSD: Tensor
    v_BKSD: Tensor
    seen_BRS: Tensor  # bool

    @classmethod
    def of(cls, asked: Asked, sight: Sight) -> Dense:
        columns = attending.lay_out(sight, torch.float32)
        batch, rows, width = columns.bias_BRS.shape
        kv, size = asked.spec.num_kv_heads, asked.spec.head_dim
        k_BKSD, v_BKSD = (
            pool.index_select(0, columns.read_BS.flatten())
            .view(batch, width, kv, size)
            .transpose(1, 2)
            .contiguous()
            for pool in (asked.layers[0].k_SKD, asked.layers[0].v_SKD)
        )
        q_BHRD = asked.q_THD.view(batch, rows, -1, size).transpose(1, 2).contiguous()
        return cls(q_BHRD, k_BKSD, v_BKSD, columns.bias_BRS == 0)


def _repeated(dense: Dense, group: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A dense mask, and query heads that share a key head find it by broadcasting."""
    mask_B1RS = dense.seen_BRS[:, None]
    return lambda k, v: sdpa(dense.q_BHRD, k, v, attn_mask=mask_B1RS, enable_gqa=group > 1)


def _packed(dense: Dense, group: int) -> Callable[[Tensor, Tensor], Tensor]:
    """A dense mask, and heads that share a key head are rows of it: keys are read once."""
    batch, heads, rows, size = dense.q_BHRD.shape
    mask = dense.seen_BRS.repeat(1, group, 1)[:, None]
    q = dense.q_BHRD.reshape(batch, heads // group, group * rows, size)
    return lambda k, v: sdpa(q, k, v, attn_mask=mask).view(batch, heads, rows, size)


def _causal(dense: Dense, group: int) -> Callable[[Tensor, Tensor], Tensor]:
    """No mask, a chain: torch's flash attention."""
    bias = causal_lower_right(dense.q_BHRD.shape[2], dense.k_BKSD.shape[2])
    return lambda k, v: sdpa(dense.q_BHRD, k, v, attn_mask=bias, enable_gqa=group > 1)


PEERS: dict[str, Callable[[Dense, int], Callable[[Tensor, Tensor], Tensor]]] = {
    "sdpa, dense mask": _repeated,
    "sdpa, dense mask, heads packed": _packed,
    "sdpa, causal": _causal,
}


def peer(bench: Bench, spec: DecoderSpec, length: int, rows: int, name: str) -> Row:
    """One request's attention by a peer, in turn with ours."""
    made = case(1, length, rows, bench.device)
    made = as_chain(made) if name == "sdpa, causal" else made
    asked = Asked.of(bench, spec, made)
    sight = behind(made.places, made.draft.end_BR, made.draft.live_B)
    ours, error = asked.caller(sight)
    dense = Dense.of(asked, sight)
    look = PEERS[name](dense, asked.group)
    told = look(dense.k_BKSD, dense.v_BKSD).transpose(1, 2).flatten(0, 1)
    error = max(error, distance(told, asked.expected(sight)))
    copies = [(dense.k_BKSD.clone(), dense.v_BKSD.clone()) for _ in asked.layers]
    turns = cycle(copies)
    mine, theirs = side_by_side(
        [ours, lambda: look(*next(turns))], bench.device, turns=len(asked.layers)
    )
    return {**bench.row(error, mine), "peer_us": theirs.ms * 1e3, "ratio": theirs.ms / mine.ms}


def drafting(bench: Bench, spec: DecoderSpec, batch: int, length: int) -> Row:
    """One level of a draft: ten rows over sixty nodes and the root."""
    made, rows = case(batch, length, 61, bench.device), 10
    asked = Asked.of(bench, spec, made)
    sees_BRN = torch.rand(batch, rows, 61, device=bench.device) < 0.3
    sees_BRN[:, :, 0] = True
    slot_BN, live_B = made.slot_BR, made.draft.live_B
    sight = Sight(made.places, slot_BN, slot_BN, live_B, sees_BRN, first=1)
    q_THD = bench.random(batch * rows, spec.num_heads, spec.head_dim)
    asked = Asked(bench, spec, made, q_THD, asked.layers)
    call, error = asked.caller(sight)
    timing = timed(call, bench.device, turns=len(asked.layers))
    return bench.row(error, timing, moved=asked.kv_bytes + 2 * q_THD.nbytes)


def sizes(tiny: bool, longest: int) -> Iterator[tuple[int, int, int]]:
    """(batch, length, rows): rows at each length, and batches at one."""
    lengths = (40,) if tiny else tuple(n for n in (1024, 2048, 8192, 16384, 65536) if n <= longest)
    for length in lengths:
        for rows in (1, 8) if tiny else (1, 4, 8, 16, 32, 64, 128, 256):
            yield 1, length, rows
    for batch in (3,) if tiny else (8, 32):
        for rows in (5,) if tiny else (1, 16, 64):
            yield batch, min(lengths[-1], 2048), rows
