"""Tree attention in Triton: pages are read where they lie, and the tree's mask is never built.

Twin of `tree_attention`. Legend: B requests, R rows, T = B * R flat rows, P pages, H query heads,
K key/value heads, G = H / K query heads of a key head, D head size, S slots, M packed rows of a
tile of work, N columns of one (of a `Sight`: columns of the tree), X splits, F packed rows that
the last split to arrive joins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.attention_cut import Tile, folds, one_tile, tile_for
from furcate.kernels.attention_join_triton import (
    Parts,
    Shares,
    fold_parts,
    join,
    tickets,
    used_splits,
)
from furcate.kernels.attention_step_triton import fold, masked_scores, own_of, pages_of
from furcate.kernels.attention_turn_triton import turned, write_own
from furcate.kernels.tree_attention import Keys, Sight
from furcate.pdl import LAUNCH, let_next_begin, wait_for_last
from furcate.shared_memory import shared_memory

__all__ = ["Tile", "tile_for", "tree_attention"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_UNROLLED = 1 << 13  # entries of parts that are read in one go
_LOG2_E = 1.4426950408889634


def tree_attention(
    q_THD: Tensor,
    keys: Keys,
    sight: Sight,
    *,
    splits: int = 1,
    tile: Tile | None = None,
    chunk: int = 0,
    angles: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attention of every row over the columns it sees, [T, H, D].

    Args:
        q_THD: T = B * R rows, request after request; heads and their entries lie dense. float32
            is computed as IEEE float32, half precision with float32 sums.
        keys: the layer's pool, K heads of the same dtype, with the rows' own keys written already
            unless there are `angles`; slots lie dense. D is a power of two from 16 on.
        sight: what each row sees; its page size is a power of two. Columns below `first` are
            hidden from all rows, and one that sees nothing gets zeros.
        splits: programs that share the columns of a request; where there is little to join the
            last of them does it, else a second kernel.
        tile: how the work is cut, by default `tile_for`, and `one_tile` with a chunk.
        chunk: columns of a split, a multiple of the tile's; there are as many splits as it takes.
            With it a row's result depends on the tile and the chunk, and on no other row.
        angles: as `turn_write` takes them; then `q_THD` is the whole projection of queries, keys
            and values, and nothing is turned or written yet.
    """
    kv = keys.k_SKD.shape[1]
    if angles is not None:
        q_THD = q_THD[:, : q_THD.shape[1] - 2 * kv]  # keys and values lie behind
    total, heads, size = q_THD.shape
    batch, rows = len(sight.live_B), sight.rows
    places, sees = sight.places, sight.sees_BRN
    assert q_THD.dtype in _DTYPES and q_THD.dtype == keys.k_SKD.dtype == keys.v_SKD.dtype
    assert total == batch * rows and heads % kv == 0
    assert size >= 16 and size == triton.next_power_of_2(size)
    assert q_THD.stride()[1:] == (size, 1)
    assert keys.k_SKD.is_contiguous() and keys.v_SKD.is_contiguous()
    assert sight.slot_BN.stride(1) == 1 and sight.end_BN.stride(1) == 1
    assert places.table_BP.stride(1) == 1 or places.table_BP.shape[1] == 1
    assert sees is None or sees.is_contiguous()
    packed = rows * (heads // kv)
    room = shared_memory(q_THD.device)
    cut = tile or (
        one_tile(size, q_THD.dtype, room)
        if chunk
        else tile_for(packed, size, q_THD.dtype, places.columns, room)
    )
    width = places.columns if sees is None else places.columns + sees.shape[2]
    if chunk:
        assert chunk % cut.columns == 0
        splits = triton.cdiv(width, chunk)
    tiles = triton.cdiv(packed, cut.rows)
    cos_T1D, sin_T1D = angles or (None, None)
    if cos_T1D is not None and sin_T1D is not None:
        assert cut.in_turn and not chunk
        assert cos_T1D.is_contiguous() and sin_T1D.is_contiguous()
    parts = Parts.of(q_THD, splits) if splits > 1 or chunk else None
    # with fixed borders never: rows that are many would not be joined by the same instructions
    folded = parts is not None and not chunk and folds(packed, splits, size, cut)
    counts = tickets(keys.k_SKD, batch * kv * tiles) if folded else None
    joined = parts is not None and counts is None
    out_THD = None if joined else q_THD.new_empty(q_THD.shape)
    folded_rows = triton.next_power_of_2(packed) if counts is not None else 1
    shares = Shares(splits, chunk, cut.in_turn, sight.first, cut.columns)
    _attend[(kv * tiles, splits, batch)](
        q_THD,
        keys.k_SKD,
        keys.v_SKD,
        out_THD,
        parts and parts.out_XTHD,
        parts and parts.weight_XTH,
        counts,
        places.table_BP,
        places.length_B,
        sight.slot_BN,
        sight.end_BN,
        sight.live_B,
        sees if sees is None else sees.view(torch.uint8),
        cos_T1D,
        sin_T1D,
        rows,
        sight.slot_BN.shape[1],
        places.table_BP.shape[1],
        total,
        splits,
        q_THD.stride(0),
        places.table_BP.stride(0),
        sight.slot_BN.stride(0),
        sight.end_BN.stride(0),
        size**-0.5 * _LOG2_E,
        CHUNK=chunk,
        TURNS=cut.in_turn,
        ONCE=splits > 1 and not chunk and width <= splits * cut.columns,
        MASKED=cut.masked or chunk > 0,
        GROUP=heads // kv,
        KV=kv,
        D=size,
        PAGE=places.page_size,
        FIRST=sight.first,
        M=cut.rows,
        N=cut.columns,
        F=folded_rows,
        X=max(1, min(triton.next_power_of_2(splits), _UNROLLED // (folded_rows * size))),
        S=1 if chunk else triton.next_power_of_2(splits),
        PRECISION="ieee" if q_THD.dtype == torch.float32 else None,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **LAUNCH,
    )
    if out_THD is not None:
        return out_THD
    assert parts is not None
    return join(q_THD, parts, places.length_B, sight.live_B, shares)


@triton.jit(
    do_not_specialize=[
        "rows",
        "wide",
        "pages",
        "total",
        "splits",
        "table_stride",
        "slot_stride",
        "end_stride",
    ]
)
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,
    weight_ptr,
    ticket_ptr,
    table_ptr,
    length_ptr,
    slot_ptr,
    end_ptr,
    live_ptr,
    sees_ptr,
    cos_ptr,
    sin_ptr,
    rows,
    wide,
    pages,
    total,
    splits,
    q_stride,
    table_stride,
    slot_stride,
    end_stride,
    scale,
    CHUNK: tl.constexpr,
    TURNS: tl.constexpr,
    ONCE: tl.constexpr,
    MASKED: tl.constexpr,
    GROUP: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    F: tl.constexpr,
    X: tl.constexpr,
    S: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One key head, one tile of packed rows, one share of the columns of one request.

    What a step needs to know of its columns (their page, or their slot and end in the tree) is
    read one step ahead, so that keys and values alone wait in the pipeline's buffers.
    """
    let_next_begin()
    wait_for_last()
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
    # pads as well, so that no row waits for how many are live
    q_at_M = row_M * q_stride + head_M * D
    if cos_ptr is None:
        at_MD = q_at_M[:, None] + tl.arange(0, D)
        q_MD = tl.load(q_ptr + at_MD, mask=(r_M < rows)[:, None], other=0.0)
    else:
        q_MD = turned(q_ptr, cos_ptr, sin_ptr, q_at_M, row_M, r_M < rows, D)
    q_MD = tl.where((r_M < used_rows)[:, None], q_MD, 0.0)
    k_ptr += kv * D
    v_ptr += kv * D
    table_ptr += b.to(tl.int64) * table_stride
    slot_ptr += b.to(tl.int64) * slot_stride
    end_ptr += b.to(tl.int64) * end_stride
    if sees_ptr is not None:
        sees_ptr += b.to(tl.int64) * rows * wide

    # steps begin at absolute multiples of N in prefix and tree alike, so that the same keys meet
    # in the same step whatever the number of rows
    last = live
    if sees_ptr is None:  # no row looks past itself
        last = tl.minimum(live, (tile * M + M - 1) // GROUP + 1)
    stop = length + last
    step = N
    if CHUNK > 0:
        begin = tl.maximum(split * CHUNK, FIRST // N * N)
        stop = tl.minimum(stop, (split + 1) * CHUNK)
    elif TURNS:  # the first page is known before the length is
        begin = (FIRST // N + split) * N
        step = splits * N
    else:
        steps = tl.cdiv(length + live, N) - FIRST // N
        share = tl.maximum(tl.cdiv(steps, splits), 1)
        begin = (FIRST // N + split * share) * N
        stop = tl.minimum(stop, begin + share * N)
    stop = tl.where(tile * M // GROUP < used_rows, stop, 0)  # pads alone: nothing to look at

    if cos_ptr is not None:
        write_own(
            q_ptr + (b * rows).to(tl.int64) * q_stride + (KV * GROUP + kv) * D,
            cos_ptr + (b * rows).to(tl.int64) * D,
            sin_ptr + (b * rows).to(tl.int64) * D,
            k_ptr,
            v_ptr,
            slot_ptr + wide - rows,
            q_stride,
            used_rows,
            length + wide - rows,
            split,
            splits,
            KV,
            D,
            FIRST,
            N,
        )

    best_M = tl.full((M,), float("-inf"), tl.float32)
    sum_M = tl.zeros((M,), tl.float32)
    acc_MD = tl.zeros((M, D), tl.float32)
    c_N = begin + tl.arange(0, N)
    page_N = pages_of(table_ptr, c_N, pages, PAGE)
    if not MASKED:
        whole = tl.minimum(length // N * N, stop)  # below it all columns are prefix
        for start in range(begin, whole, step):
            c_N = start + tl.arange(0, N)
            slot_N = page_N * PAGE + c_N % PAGE
            page_N = pages_of(table_ptr, c_N + step, pages, PAGE)
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
            best_M, sum_M, acc_MD = fold(best_M, sum_M, acc_MD, score_MN, v_ND, scale, PRECISION)
        begin += tl.cdiv(tl.maximum(whole - begin, 0), step) * step
        c_N = begin + tl.arange(0, N)
    own_N, end_N = own_of(slot_ptr, end_ptr, c_N - length, live, rows, sees_ptr is None)
    if ONCE:
        score_MN, v_ND = masked_scores(
            q_MD,
            k_ptr,
            v_ptr,
            sees_ptr,
            c_N,
            page_N,
            own_N,
            end_N,
            r_M,
            length,
            live,
            stop,
            rows,
            wide,
            KV,
            D,
            PAGE,
            FIRST,
            PRECISION,
        )
        best_M, sum_M, acc_MD = fold(best_M, sum_M, acc_MD, score_MN, v_ND, scale, PRECISION)
    else:
        for start in range(begin, stop, step):
            c_N = start + tl.arange(0, N)
            score_MN, v_ND = masked_scores(
                q_MD,
                k_ptr,
                v_ptr,
                sees_ptr,
                c_N,
                page_N,
                own_N,
                end_N,
                r_M,
                length,
                live,
                stop,
                rows,
                wide,
                KV,
                D,
                PAGE,
                FIRST,
                PRECISION,
            )
            page_N = pages_of(table_ptr, c_N + step, pages, PAGE)
            own_N, end_N = own_of(
                slot_ptr, end_ptr, c_N + step - length, live, rows, sees_ptr is None
            )
            best_M, sum_M, acc_MD = fold(best_M, sum_M, acc_MD, score_MN, v_ND, scale, PRECISION)

    none_M = sum_M == 0
    acc_MD = acc_MD * (1.0 / tl.where(none_M, 1.0, sum_M))[:, None]
    kept_M = r_M < rows
    at_M = row_M * (KV * GROUP) + head_M
    if part_ptr is None:
        tl.store(out_ptr + at_M[:, None] * D + d_D, acc_MD, mask=kept_M[:, None])
    else:
        weight_M = best_M * scale + tl.log2(tl.where(none_M, 1.0, sum_M))
        used = used_splits(length + live, splits, CHUNK, TURNS, FIRST, N)
        kept_M &= split < used
        count = total * (KV * GROUP)
        own_M = split.to(tl.int64) * count + at_M
        tl.store(part_ptr + own_M[:, None] * D + d_D, acc_MD, mask=kept_M[:, None])
        tl.store(weight_ptr + own_M, weight_M, mask=kept_M)
        if ticket_ptr is not None:
            f_F = tl.arange(0, F)
            at_F = (b * rows + f_F // GROUP).to(tl.int64) * (KV * GROUP) + kv * GROUP + f_F % GROUP
            ticket_ptr += b * tl.num_programs(0) + tl.program_id(0)
            fold_parts(
                ticket_ptr,
                part_ptr,
                weight_ptr,
                out_ptr,
                at_F,
                f_F < rows * GROUP,
                split,
                used,
                count,
                S,
                X,
                D,
            )
