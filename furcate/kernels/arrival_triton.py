"""What a pass begins with in Triton: places, embeddings and angles of all rows in one launch.

Twin of `tree_attention.behind`, `Decoder.embed` and `Rope` one after the other. Legend: B requests,
R rows, T = B * R flat rows, V vocabulary, C hidden size, N lanes of it, F frequencies.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from furcate.kernels.angles_triton import lay_angles
from furcate.kernels.arrival import Arrival, Words
from furcate.kernels.draft import Draft
from furcate.kernels.tree_attention import SCRATCH, Places

__all__ = ["arrive"]

_SCRATCH = tl.constexpr(SCRATCH)
_LANES = 1024  # entries of an embedding that a program copies


def arrive(places: Places, draft: Draft, words: Words) -> Arrival:
    """As its reference; angles are float32, cosines and sines rounded from that."""
    batch, rows = draft.tokens_BR.shape
    token_T, depth_T = draft.tokens_BR.flatten(), draft.depth_BR.flatten()
    embedding_VC, size = words.embedding_VC, 2 * len(words.freq_F)
    assert words.freq_F.dtype == torch.float32 and words.freq_F.is_contiguous()
    assert embedding_VC.is_contiguous() and places.table_BP.stride(1) == 1
    assert places.length_B.is_contiguous() and draft.live_B.is_contiguous()
    slot_BR, next_BR = (token_T.new_empty((batch, rows)) for _ in "sn")
    x_TC = embedding_VC.new_empty((batch * rows, embedding_VC.shape[1]))
    cos_T1D, sin_T1D = (embedding_VC.new_empty((batch * rows, 1, size)) for _ in "cs")
    blocks = triton.cdiv(x_TC.shape[1], _LANES)
    _arrive[(batch * rows, 1 + blocks)](
        token_T,
        depth_T,
        draft.live_B,
        places.length_B,
        places.table_BP,
        embedding_VC,
        words.freq_F,
        slot_BR,
        next_BR,
        x_TC,
        cos_T1D,
        sin_T1D,
        rows,
        places.table_BP.stride(0),
        words.factor,
        RUN=places.run is not None,
        PAGE=places.page_size,
        C=x_TC.shape[1],
        F=size // 2,
        N=min(_LANES, triton.next_power_of_2(x_TC.shape[1])),
        LANES_F=triton.next_power_of_2(size // 2),
        num_warps=1 if blocks == 1 else 4,
        enable_fp_fusion=False,  # rounds as the torch path does
    )
    return Arrival(slot_BR, next_BR, x_TC, cos_T1D, sin_T1D)


@triton.jit(do_not_specialize=["rows", "table_stride"])
def _arrive(
    token_ptr,
    depth_ptr,
    live_ptr,
    length_ptr,
    table_ptr,
    embedding_ptr,
    freq_ptr,
    slot_ptr,
    next_ptr,
    x_ptr,
    cos_ptr,
    sin_ptr,
    rows,
    table_stride,
    factor,
    RUN: tl.constexpr,
    PAGE: tl.constexpr,
    C: tl.constexpr,
    F: tl.constexpr,
    N: tl.constexpr,
    LANES_F: tl.constexpr,
):
    """A row's place and angles, or a stretch of its embedding."""
    t = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) > 0:
        at_N = (tl.program_id(1) - 1) * N + tl.arange(0, N)
        token = tl.load(token_ptr + t)
        x_N = tl.load(embedding_ptr + token * C + at_N, mask=at_N < C)
        tl.store(x_ptr + t * C + at_N, x_N, mask=at_N < C)
    else:
        b = t // rows
        r = t % rows
        length = tl.load(length_ptr + b)
        used = (r < tl.load(live_ptr + b)) | RUN
        place = length + r
        page = tl.load(table_ptr + b * table_stride + place // PAGE, mask=used, other=0)
        tl.store(slot_ptr + t, tl.where(used, page * PAGE + place % PAGE, _SCRATCH))
        position = length + tl.load(depth_ptr + t)
        tl.store(next_ptr + t, position + 1)
        lay_angles(position, t, freq_ptr, cos_ptr, sin_ptr, factor, F, LANES_F)
