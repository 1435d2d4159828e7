"""One level of a growing tree in Triton: worth, pruning, the pool and the next frontier at once.

Twin of `furcate.drafters.expand`'s levels in torch. Legend: B requests, F frontier rows, C children
of a row, X = F * C candidates padded to a power of two, R rows that go on, padded likewise,
N the root and the frontier nodes, W of them at a time, K bins or knots.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.grow import (
    BINS,
    HIGHEST,
    PRIOR_WEIGHT,
    STEPS,
    Frontier,
    Likeliest,
    Place,
    Trees,
    Yardstick,
)

__all__ = ["grow"]

_MOST = 1 << 14  # candidates of a level
_STEPS = tl.constexpr(STEPS)
_BINS = tl.constexpr(BINS)
_PRIOR = tl.constexpr(PRIOR_WEIGHT)
_LEAST = tl.constexpr(-1e30)  # a log that is still a number
_TINY = tl.constexpr(1e-9)
_NEVER = tl.constexpr(float("-inf"))
_NOBODY = tl.constexpr(-(2**63))


def grow(
    likeliest: Likeliest, frontier: Frontier | None, by: Yardstick, place: Place, trees: Trees
) -> Frontier | None:
    """As `furcate.kernels.grow.Grow`, in one launch; all tensors lie dense.

    Of equally valuable candidates the first goes on.
    """
    batch, served, children = likeliest.weight_BFC.shape
    rows = 1 if frontier is None else frontier.value_BF.shape[1]
    candidates = rows * children
    assert served in (1, rows) and candidates <= _MOST and place.rows <= candidates
    pool = trees.pool
    assert pool.tag_BP is not None and likeliest.weight_BFC.dtype == torch.float32
    asks = by.kappa is not None or by.gamma is not None
    entropy_BF = likeliest.entropy_BF if asks else None
    assert not asks or entropy_BF is not None
    next_up = _empty(frontier, place.rows, trees) if place.rows else None
    written = (pool.tokens_BP, pool.parent_BP, pool.depth_BP, pool.value_BP, pool.tag_BP)
    measures = (by.token_D, *(by.knots or (None, None)), by.expected_K, by.accepted_K)
    read = (likeliest.word_BFC, likeliest.weight_BFC, entropy_BF, *_fields(frontier, 4))
    given = (*read, *measures, place.pick_F, place.kept_X, trees.length_B)
    assert all(x is None or x.is_contiguous() for x in (*given, *written))
    lanes = max(2, triton.next_power_of_2(candidates))
    _grow[(batch,)](
        *given,
        *written,
        *_fields(next_up, 8),
        rows,
        children,
        int(served > 1),
        0 if by.token_D is None else len(by.token_D),
        pool.tokens_BP.shape[1],
        place.begin,
        place.depth,
        _above(frontier),
        place.rows,
        math.log(HIGHEST),
        by.kappa,
        by.gamma,
        by.least,
        math.log(by.least) if by.least > 0 else None,
        K=0 if by.knots is None else len(by.knots[0]),
        X=lanes,
        R=max(2, triton.next_power_of_2(place.rows)),
        W=64,
        num_warps=min(16, max(1, lanes // 128)),
        enable_fp_fusion=False,  # values round as the torch path has them
    )
    return next_up


def _empty(frontier: Frontier | None, rows: int, trees: Trees) -> Frontier:
    """A frontier that nobody has written yet."""
    batch = len(trees.length_B)
    whole_4BF = trees.length_B.new_empty((4, batch, rows))
    tokens_BF, index_BF, row_BF, at_BF = whole_4BF.unbind()
    below_BF = trees.length_B.new_empty((batch, rows))
    value_BF, plain_BF = trees.pool.value_BP.new_empty((2, batch, rows)).unbind()
    seen_BFN = trees.length_B.new_empty((batch, rows, _above(frontier) + rows), dtype=torch.bool)
    return Frontier(tokens_BF, value_BF, plain_BF, index_BF, row_BF, seen_BFN, at_BF, below_BF)


def _above(frontier: Frontier | None) -> int:
    """Columns that the level above sees: the root has itself."""
    return 1 if frontier is None else frontier.seen_BFN.shape[2]


def _fields(frontier: Frontier | None, count: int) -> tuple[Tensor | None, ...]:
    """Of a frontier's tensors the first `count` as the kernel takes them."""
    if frontier is None:
        return (None,) * count
    f = frontier
    above = (f.value_BF, f.plain_BF, f.index_BF, f.seen_BFN)
    return (*above, f.tokens_BF, f.row_BF, f.at_BF, f.below_BF)[:count]


@triton.jit
def _grow(
    word_ptr,
    weight_ptr,
    entropy_ptr,
    value_ptr,
    plain_ptr,
    index_ptr,
    seen_ptr,
    token_ptr,
    x_ptr,
    y_ptr,
    expected_ptr,
    accepted_ptr,
    pick_ptr,
    kept_ptr,
    length_ptr,
    pool_tokens_ptr,
    pool_parent_ptr,
    pool_depth_ptr,
    pool_value_ptr,
    pool_tag_ptr,
    next_value_ptr,
    next_plain_ptr,
    next_index_ptr,
    next_seen_ptr,
    next_tokens_ptr,
    next_row_ptr,
    next_at_ptr,
    next_below_ptr,
    rows,
    children,
    each,
    words,
    pool,
    begin,
    depth,
    above,
    going_on,
    highest,
    kappa,
    gamma,
    least,
    log_least,
    K: tl.constexpr,
    X: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    x_X = tl.arange(0, X)
    used_X = x_X < rows * children
    row_X = x_X // children
    up_X = b * rows + row_X
    from_X = (b * (1 + each * (rows - 1)) + row_X * each) * children + x_X % children
    if value_ptr is None:
        above_X = tl.zeros((X,), tl.float32)
        above_plain_X = above_X
        parent_X = tl.full((X,), -1, tl.int64)
    else:
        above_X = tl.load(value_ptr + up_X, mask=used_X, other=0.0)
        above_plain_X = tl.load(plain_ptr + up_X, mask=used_X, other=0.0)
        parent_X = tl.load(index_ptr + up_X, mask=used_X, other=-1)
    weight_X = tl.load(weight_ptr + from_X, mask=used_X, other=_NEVER)
    weight_X = tl.where(weight_X == weight_X, weight_X, _NEVER)
    plain_X = tl.maximum(above_plain_X + weight_X, _LEAST)
    step_X = weight_X
    if K > 0:
        step_X = _mapped(plain_X, x_ptr, y_ptr, K) - _mapped(above_plain_X, x_ptr, y_ptr, K)
    tag_X = (tl.exp(step_X) * (_STEPS - 1)).to(tl.int64)
    bin_X = tl.minimum(tl.maximum(tag_X * _BINS // _STEPS, 0), _BINS - 1)
    accepted_X = _PRIOR + tl.load(accepted_ptr + bin_X)
    expected_X = _PRIOR + tl.load(expected_ptr + bin_X)
    value_X = above_X + tl.minimum(step_X + tl.log(tl.div_rn(accepted_X, expected_X)), highest)
    value_X = tl.where(weight_X == _NEVER, _NEVER, value_X)

    if entropy_ptr is not None:
        at_X = b * (1 + each * (rows - 1)) + row_X * each
        entropy_X = tl.load(entropy_ptr + at_X, mask=used_X, other=0.0)
        if kappa is not None:
            cap_X = 1 + tl.ceil(kappa * (tl.exp(entropy_X) - 1))
            value_X = tl.where((x_X % children).to(tl.float32) >= cap_X, _NEVER, value_X)
        if gamma is not None:
            hope_X = 1 - tl.sqrt_rn(gamma * entropy_X)
            hope_X = tl.where(hope_X < 0, 0.0, hope_X)  # one that is no number shuts nothing
            value_X = tl.where(tl.exp(above_X) * hope_X < least, _NEVER, value_X)
    if log_least is not None:
        value_X = tl.where(value_X < log_least, _NEVER, value_X)
    if kept_ptr is not None:
        kept_X = tl.load(kept_ptr + x_X, mask=used_X, other=0).to(tl.int1)
        value_X = tl.where(kept_X, value_X, _NEVER)

    token_X = tl.load(word_ptr + from_X, mask=used_X, other=0)
    if token_ptr is not None:
        known_X = used_X & (token_X >= 0) & (token_X < words)
        token_X = tl.load(token_ptr + token_X, mask=known_X, other=0)
    out_X = b * pool + begin + x_X
    tl.store(pool_tokens_ptr + out_X, token_X, mask=used_X)
    tl.store(pool_parent_ptr + out_X, parent_X, mask=used_X)
    tl.store(pool_depth_ptr + out_X, tl.zeros((X,), tl.int64) + depth, mask=used_X)
    tl.store(pool_value_ptr + out_X, value_X, mask=used_X)
    tl.store(pool_tag_ptr + out_X, tag_X, mask=used_X)

    if next_value_ptr is not None:
        r_R = tl.arange(0, R)
        on_R = r_R < going_on
        if pick_ptr is None:
            key_X = tl.where(used_X, _key(value_X, x_X), _NOBODY)
            pick_R = (0xFFFFFFFF - (tl.topk(key_X, R) & 0xFFFFFFFF)).to(tl.int32)
            pick_R = tl.where(on_R, pick_R, 0)
        else:
            pick_R = tl.load(pick_ptr + r_R, mask=on_R, other=0).to(tl.int32)
        next_R = b * going_on + r_R
        came_R = pick_R // children
        zero_R = tl.zeros((R,), tl.int64)
        tl.store(next_value_ptr + next_R, tl.gather(value_X, pick_R, 0), mask=on_R)
        tl.store(next_plain_ptr + next_R, tl.gather(plain_X, pick_R, 0), mask=on_R)
        tl.store(next_tokens_ptr + next_R, tl.gather(token_X, pick_R, 0), mask=on_R)
        tl.store(next_index_ptr + next_R, zero_R + pick_R + begin, mask=on_R)
        tl.store(next_row_ptr + next_R, zero_R + came_R, mask=on_R)
        at = tl.load(length_ptr + b) + depth
        tl.store(next_at_ptr + next_R, zero_R + at, mask=on_R)
        tl.store(next_below_ptr + next_R, zero_R + at + 1, mask=on_R)
        for first in range(0, above + going_on, W):
            n_W = first + tl.arange(0, W)
            seen_RW = n_W[None, :] - above == r_R[:, None]
            if seen_ptr is None:
                seen_RW |= n_W[None, :] == 0  # the root
            else:
                old_RW = on_R[:, None] & (n_W < above)[None, :]
                from_RW = (b * rows + came_R[:, None]) * above + n_W[None, :]
                seen_RW |= tl.load(seen_ptr + from_RW, mask=old_RW, other=0).to(tl.int1)
            wide = above + going_on
            inside_RW = on_R[:, None] & (n_W < wide)[None, :]
            tl.store(next_seen_ptr + next_R[:, None] * wide + n_W[None, :], seen_RW, mask=inside_RW)


@triton.jit
def _mapped(log_X, x_ptr, y_ptr, K: tl.constexpr):
    """`Curve` of logs."""
    value_X = tl.exp(log_X)
    above_X = tl.zeros_like(value_X).to(tl.int32)
    for k in tl.static_range(K):
        above_X += (tl.load(x_ptr + k) < value_X).to(tl.int32)
    high_X = tl.minimum(above_X, K - 1)
    low_X = tl.maximum(above_X - 1, 0)
    x_low_X, x_high_X = tl.load(x_ptr + low_X), tl.load(x_ptr + high_X)
    y_low_X, y_high_X = tl.load(y_ptr + low_X), tl.load(y_ptr + high_X)
    share_X = tl.div_rn(value_X - x_low_X, tl.maximum(x_high_X - x_low_X, _TINY))
    inside_X = tl.log(y_low_X + share_X * (y_high_X - y_low_X))
    outside_X = log_X + tl.log(tl.div_rn(y_high_X, x_high_X))
    last = tl.log(tl.load(y_ptr + K - 1))
    beyond_X = tl.maximum(tl.minimum(outside_X, 0.0), last)
    return tl.where(above_X == 0, outside_X, tl.where(above_X == K, beyond_X, inside_X))


@triton.jit
def _key(value_X, id_X):
    """int64, larger for what goes on first: by value, then the lower id."""
    bits_X = tl.where(value_X == 0, 0.0, value_X).to(tl.int32, bitcast=True)  # -0 equals 0
    order_X = tl.where(bits_X < 0, bits_X ^ 0x7FFFFFFF, bits_X).to(tl.int64)
    return (order_X << 32) | (0xFFFFFFFF - id_X.to(tl.int64))
