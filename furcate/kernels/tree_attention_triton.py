"""Tree attention in Triton: pages are read where they lie, and the tree's mask is never built.

Twin of `tree_attention`. Legend: B requests, R rows, T = B * R flat rows, P pages, H query heads,
K key/value heads, G = H / K query heads of a key head, D head size, S slots, M packed rows of a
tile of work, N columns of one (of a `Sight`: columns of the tree), X splits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.tree_attention import Keys, Sight

__all__ = ["Tile", "look", "look_invariant", "one_tile", "splits_for", "tile_for", "tree_attention"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LEAST_ROWS = 16  # of a matrix unit
_WAVE = 264  # programs: two for each processor, or too few bytes are on their way
_MOST_SPLITS = 64
_LEAST_SHARE = 128  # columns
_CHUNK = 512  # columns of a split whose borders are fixed
_JOINED = 16  # splits that are joined in one step
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work is cut.

    A row's result is the same for every cut up to rounding. With one split it is the same bit for
    bit for every number of rows in the pass as long as the cut stays.
    """

    rows: int  # packed rows of a program, at least 16
    columns: int  # keys looked at in one step
    warps: int = 4
    stages: int = 3


def tile_for(packed_rows: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """A cut for so many packed rows (R * G): each key is read once up to 64 of them."""
    rows = max(_LEAST_ROWS, min(64, triton.next_power_of_2(packed_rows)))
    wide = head_dim * dtype.itemsize > 256
    return Tile(rows, columns=32 if wide else 64)


def one_tile(head_dim: int, dtype: torch.dtype) -> Tile:
    """The same for every number of rows."""
    rows = 64 if dtype.itemsize == 2 else _LEAST_ROWS
    return Tile(rows, tile_for(rows, head_dim, dtype).columns)


def splits_for(programs: int, columns: int) -> int:
    """How many programs should share the columns of a request, given those of one split.

    About one wave of a large GPU where a processor holds two, and no share so small that joining it
    costs more than it saves.
    """
    wanted = min(_WAVE // max(1, programs), columns // _LEAST_SHARE)
    return max(1, min(_MOST_SPLITS, wanted))


def look(sight: Sight, group: int, dtype: torch.dtype) -> Callable[[Tensor, Keys], Tensor]:
    """As `furcate.kernels.tree_attention.look`."""

    def attend(q_THD: Tensor, keys: Keys) -> Tensor:
        kv, size = keys.k_SKD.shape[1:]
        tile = tile_for(sight.rows * group, size, dtype)
        tiles = triton.cdiv(sight.rows * group, tile.rows)
        programs = kv * tiles * len(sight.live_B)
        splits = splits_for(programs, sight.places.columns)
        return tree_attention(q_THD, keys, sight, splits=splits, tile=tile)

    return attend


def look_invariant(
    sight: Sight, group: int, dtype: torch.dtype
) -> Callable[[Tensor, Keys], Tensor]:
    """As `look`; a row's result is the same bit for bit whatever other rows and requests there are.

    So one row of a chain sees what it would see alone.
    """

    def attend(q_THD: Tensor, keys: Keys) -> Tensor:
        tile = one_tile(keys.k_SKD.shape[2], dtype)
        return tree_attention(q_THD, keys, sight, tile=tile, chunk=_CHUNK)

    return attend


def tree_attention(
    q_THD: Tensor,
    keys: Keys,
    sight: Sight,
    *,
    splits: int = 1,
    tile: Tile | None = None,
    chunk: int = 0,
) -> Tensor:
    """Attention of every row over the columns it sees, [T, H, D].

    Args:
        q_THD: T = B * R rows, request after request; heads and their entries lie dense. float32
            is computed as IEEE float32, half precision with float32 sums.
        keys: the layer's pool, K heads of the same dtype, with the rows' own keys written already;
            slots lie dense. D is a power of two from 16 on.
        sight: what each row sees; its page size is a power of two. Columns below `first` are
            hidden from all rows, and one that sees nothing gets zeros.
        splits: programs that share the columns of a request; a second kernel joins them.
        tile: how the work is cut, by default `tile_for`.
        chunk: columns of a split, a multiple of the tile's; there are as many splits as it takes.
            With it a row's result depends on the tile and the chunk, and on no other row.
    """
    (total, heads, size), kv = q_THD.shape, keys.k_SKD.shape[1]
    batch, rows = len(sight.live_B), sight.rows
    places, sees = sight.places, sight.sees_BRN
    assert q_THD.dtype in _DTYPES and q_THD.dtype == keys.k_SKD.dtype == keys.v_SKD.dtype
    assert total == batch * rows and heads % kv == 0
    assert size >= _LEAST_ROWS and size == triton.next_power_of_2(size)
    assert q_THD.stride()[1:] == (size, 1)
    assert keys.k_SKD.is_contiguous() and keys.v_SKD.is_contiguous()
    assert sight.slot_BN.stride(1) == 1 and sight.end_BN.stride(1) == 1
    assert sees is None or sees.is_contiguous()
    group = heads // kv
    cut = tile or tile_for(rows * group, size, q_THD.dtype)
    if chunk:
        assert chunk % cut.columns == 0
        width = places.columns if sees is None else places.columns + sees.shape[2]
        splits = triton.cdiv(width, chunk)
    parts = _Parts.of(q_THD, splits, joined=splits > 1 or chunk > 0)
    tiles = triton.cdiv(rows * group, cut.rows)
    _attend[(kv * tiles, splits, batch)](
        q_THD,
        keys.k_SKD,
        keys.v_SKD,
        parts.out_XTHD,
        parts.weight_XTH,
        places.table_BP,
        places.length_B,
        sight.slot_BN,
        sight.end_BN,
        sight.live_B,
        sees if sees is None else sees.view(torch.uint8),
        rows,
        sight.slot_BN.shape[1],
        total,
        q_THD.stride(0),
        places.table_BP.stride(0),
        sight.slot_BN.stride(0),
        sight.end_BN.stride(0),
        size**-0.5 * _LOG2_E,
        SPLITS=0 if chunk else splits,
        CHUNK=chunk,
        GROUP=group,
        KV=kv,
        D=size,
        PAGE=places.page_size,
        FIRST=sight.first,
        M=cut.rows,
        N=cut.columns,
        PRECISION="ieee" if q_THD.dtype == torch.float32 else None,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    if parts.weight_XTH is None:
        return parts.out_XTHD[0]
    out_THD = q_THD.new_empty(q_THD.shape)
    _join[(total * heads,)](
        parts.out_XTHD,
        parts.weight_XTH,
        out_THD,
        places.length_B,
        sight.live_B,
        rows * heads,
        total * heads,
        SPLITS=0 if chunk else splits,
        CHUNK=chunk,
        X=_JOINED if chunk else min(_JOINED, triton.next_power_of_2(splits)),
        D=size,
        num_warps=1,
    )
    return out_THD


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the splits found; what is not joined is the result itself."""

    out_XTHD: Tensor  # each split's own weighted mean
    weight_XTH: Tensor | None  # float32, base-2 logarithm of the sum of its weights

    @staticmethod
    def of(q_THD: Tensor, splits: int, *, joined: bool) -> _Parts:
        if not joined:
            return _Parts(q_THD.new_empty((1, *q_THD.shape)), None)
        out_XTHD = q_THD.new_empty((splits, *q_THD.shape), dtype=torch.float32)
        return _Parts(out_XTHD, out_XTHD.new_empty(out_XTHD.shape[:3]))


@triton.jit(
    do_not_specialize=["rows", "wide", "total", "table_stride", "slot_stride", "end_stride"]
)
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    weight_ptr,
    table_ptr,
    length_ptr,
    slot_ptr,
    end_ptr,
    live_ptr,
    sees_ptr,
    rows,
    wide,
    total,
    q_stride,
    table_stride,
    slot_stride,
    end_stride,
    scale,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One key head, one tile of packed rows, one share of the columns of one request."""
    kv = tl.program_id(0) % KV
    tile = tl.program_id(0) // KV
    split = tl.program_id(1)
    b = tl.program_id(2)
    length = tl.load(length_ptr + b).to(tl.int32)
    live = tl.load(live_ptr + b).to(tl.int32)
    used_rows = live
    if sees_ptr is not None:
        used_rows = rows

    m_M = tile * M + tl.arange(0, M)
    r_M = m_M // GROUP
    d_D = tl.arange(0, D)
    row_M = (b * rows + r_M).to(tl.int64)
    head_M = kv * GROUP + m_M % GROUP
    q_MD = tl.load(
        q_ptr + row_M[:, None] * q_stride + head_M[:, None] * D + d_D,
        mask=(r_M < used_rows)[:, None],
        other=0.0,
    )
    k_ptr += kv * D
    v_ptr += kv * D
    table_ptr += b.to(tl.int64) * table_stride
    slot_ptr += b.to(tl.int64) * slot_stride
    end_ptr += b.to(tl.int64) * end_stride
    if sees_ptr is not None:
        sees_ptr += b.to(tl.int64) * rows * wide

    # tiles of columns begin at absolute multiples of N in prefix and tree alike, so that the same
    # keys meet in the same step whatever the number of rows
    share = CHUNK
    if CHUNK == 0:
        share = tl.cdiv(tl.cdiv(length + live, N), SPLITS) * N
    begin = tl.maximum(split * share, FIRST // N * N)
    last = live
    if sees_ptr is None:  # no row looks past itself
        last = tl.minimum(live, (tile * M + M - 1) // GROUP + 1)
    stop = tl.minimum(length + last, (split + 1) * share)
    stop = tl.where(tile * M // GROUP < used_rows, stop, 0)  # pads alone: nothing to look at
    whole = tl.minimum(length // N * N, stop)  # below it all columns are prefix
    if CHUNK > 0:  # one loop for all, so that the same instructions meet the same keys
        whole = begin

    best_M = tl.full((M,), float("-inf"), tl.float32)
    sum_M = tl.zeros((M,), tl.float32)
    acc_MD = tl.zeros((M, D), tl.float32)
    for start in range(begin, whole, N):
        c_N = start + tl.arange(0, N)
        slot_N = tl.load(table_ptr + c_N // PAGE) * PAGE + c_N % PAGE
        at_ND = slot_N[:, None] * (KV * D) + d_D
        if FIRST == 0:
            k_ND = tl.load(k_ptr + at_ND)
            v_ND = tl.load(v_ptr + at_ND)
        else:
            k_ND = tl.load(k_ptr + at_ND, mask=(c_N >= FIRST)[:, None], other=0.0)
            v_ND = tl.load(v_ptr + at_ND, mask=(c_N >= FIRST)[:, None], other=0.0)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
        if FIRST > 0:
            score_MN = tl.where((c_N >= FIRST)[None, :], score_MN, float("-inf"))
        best_M, sum_M, acc_MD = _fold(best_M, sum_M, acc_MD, score_MN, v_ND, scale, PRECISION)
    for start in range(tl.maximum(begin, whole), stop, N):
        c_N = start + tl.arange(0, N)
        j_N = c_N - length  # column of the tree
        used_N = (c_N >= FIRST) & (j_N < live)
        in_tree_N = used_N & (j_N >= 0)
        page_N = tl.load(table_ptr + c_N // PAGE, mask=used_N & (j_N < 0), other=0)
        slot_N = tl.load(slot_ptr + j_N, mask=in_tree_N, other=0)
        slot_N = tl.where(in_tree_N, slot_N, page_N * PAGE + c_N % PAGE)
        at_ND = slot_N[:, None] * (KV * D) + d_D
        # a hidden column still multiplies what is read there by 0, so nothing may be read
        k_ND = tl.load(k_ptr + at_ND, mask=used_N[:, None], other=0.0)
        v_ND = tl.load(v_ptr + at_ND, mask=used_N[:, None], other=0.0)
        if sees_ptr is None:
            end_N = tl.load(end_ptr + j_N, mask=in_tree_N, other=rows)
            seen_MN = used_N[None, :] & (r_M[:, None] < end_N[None, :])
            seen_MN &= j_N[None, :] <= r_M[:, None]
        else:
            asked_MN = (r_M < rows)[:, None] & in_tree_N[None, :]
            sees_MN = tl.load(sees_ptr + r_M[:, None] * wide + j_N[None, :], mask=asked_MN, other=0)
            seen_MN = (used_N & (j_N < 0))[None, :] | (sees_MN != 0)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
        score_MN = tl.where(seen_MN, score_MN, float("-inf"))
        best_M, sum_M, acc_MD = _fold(best_M, sum_M, acc_MD, score_MN, v_ND, scale, PRECISION)

    none_M = sum_M == 0
    acc_MD = acc_MD / tl.where(none_M, 1.0, sum_M)[:, None]
    kept_M = r_M < rows
    if CHUNK > 0:  # nobody reads a split that begins behind all columns
        kept_M &= split * CHUNK < length + live
    out_M = (split * total + row_M) * (KV * GROUP) + head_M
    tl.store(out_ptr + out_M[:, None] * D + d_D, acc_MD, mask=kept_M[:, None])
    if SPLITS != 1:
        weight_M = best_M * scale + tl.log2(tl.where(none_M, 1.0, sum_M))
        tl.store(weight_ptr + out_M, weight_M, mask=kept_M)


@triton.jit
def _fold(best_M, sum_M, acc_MD, score_MN, v_ND, scale, PRECISION: tl.constexpr):
    """Online softmax in base 2 (Milakov and Gimelshein 2018, algorithm 3): one more tile."""
    # scores are scaled behind the difference: a product before it might be fused into it in one
    # of the two loops and not in the other
    new_M = tl.maximum(best_M, tl.max(score_MN, 1))
    at_M = tl.where(new_M == float("-inf"), 0.0, new_M)  # a row that has seen nothing yet
    weight_MN = tl.exp2((score_MN - at_M[:, None]) * scale)
    keep_M = tl.exp2((best_M - at_M) * scale)
    sum_M = sum_M * keep_M + tl.sum(weight_MN, 1)
    acc_MD = tl.dot(
        weight_MN.to(v_ND.dtype), v_ND, acc_MD * keep_M[:, None], input_precision=PRECISION
    )
    return new_M, sum_M, acc_MD


@triton.jit(do_not_specialize=["of_request", "count"])
def _join(
    out_ptr,
    weight_ptr,
    joined_ptr,
    length_ptr,
    live_ptr,
    of_request,
    count,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
):
    """One row and head: the splits' means by their weights; a split that saw nothing weighs 0."""
    at = tl.program_id(0).to(tl.int64)
    d_D = tl.arange(0, D)
    splits = SPLITS
    if CHUNK > 0:
        b = at // of_request
        splits = tl.cdiv(tl.load(length_ptr + b) + tl.load(live_ptr + b), CHUNK).to(tl.int32)
    best = float("-inf")
    total = 0.0
    sum_D = tl.zeros((D,), tl.float32)
    for start in range(0, splits, X):
        x_X = start + tl.arange(0, X)
        part_X = x_X * count + at
        weight_X = tl.load(weight_ptr + part_X, mask=x_X < splits, other=float("-inf"))
        part_XD = tl.load(
            out_ptr + part_X[:, None] * D + d_D, mask=(x_X < splits)[:, None], other=0.0
        )
        new = tl.maximum(best, tl.max(weight_X, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)  # nothing seen yet
        share_X = tl.exp2(weight_X - safe)
        keep = tl.exp2(best - safe)
        total = total * keep + tl.sum(share_X, 0)
        sum_D = sum_D * keep + tl.sum(part_XD * share_X[:, None], 0)
        best = new
    mean_D = sum_D / tl.where(total == 0, 1.0, total)
    tl.store(joined_ptr + at * D + d_D, mean_D)
