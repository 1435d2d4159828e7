"""One step of tree attention in Triton: which columns it meets, their scores, the online softmax.

Legend: D head size, M packed rows of a tile of work, N columns of one, S slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["fold", "masked_scores", "own_of", "pages_of"]


@triton.jit
def pages_of(table_ptr, c_N, pages, PAGE: tl.constexpr):
    """Pages of some columns; what is said of columns of nobody's is for nobody to use."""
    return tl.load(table_ptr + c_N // PAGE, mask=c_N // PAGE < pages, other=0)


@triton.jit
def own_of(slot_ptr, end_ptr, j_N, live, rows, ENDS: tl.constexpr):
    """Slots and ends of columns of the tree; every row sees those of the prefix.

    Other columns read the nearest one's instead of nothing: no lane is switched off, and what is
    said of columns behind the tree is for nobody to use.
    """
    near_N = tl.maximum(tl.minimum(j_N, live - 1), 0)
    own_N = tl.load(slot_ptr + near_N)
    end_N = own_N
    if ENDS:
        end_N = tl.where(j_N < 0, rows, tl.load(end_ptr + near_N))
    return own_N, end_N


@triton.jit
def masked_scores(
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
    KV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scores of columns of prefix or tree, minus infinity where a row does not see one; values."""
    j_N = c_N - length  # column of the tree
    used_N = (c_N >= FIRST) & (c_N < stop)
    in_tree_N = used_N & (j_N >= 0)
    slot_N = tl.where(j_N >= 0, own_N, page_N * PAGE + c_N % PAGE)
    at_ND = slot_N[:, None] * (KV * D) + tl.arange(0, D)
    # a hidden column still multiplies what is read there by 0, so nothing may be read
    k_ND = tl.load(k_ptr + at_ND, mask=used_N[:, None], other=0.0)
    v_ND = tl.load(v_ptr + at_ND, mask=used_N[:, None], other=0.0)
    if sees_ptr is None:
        seen_MN = used_N[None, :] & (r_M[:, None] < end_N[None, :])
        seen_MN &= j_N[None, :] <= r_M[:, None]
    else:
        asked_MN = (r_M < rows)[:, None] & in_tree_N[None, :]
        sees_MN = tl.load(sees_ptr + r_M[:, None] * wide + j_N[None, :], mask=asked_MN, other=0)
        seen_MN = (used_N & (j_N < 0))[None, :] | (sees_MN != 0)
    score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
    return tl.where(seen_MN, score_MN, float("-inf")), v_ND


@triton.jit
def fold(best_M, sum_M, acc_MD, score_MN, v_ND, scale, PRECISION: tl.constexpr):
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
