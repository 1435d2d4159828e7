"""The likeliest children of each draft row in Triton, with the target's noise drawn on the fly.

Twin of `draft_head`. Legend: N rows, V draft vocabulary, X tiles of it, Q blocks of four tokens,
C children of a row padded to a power of two, M merged candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.draft_head import Children, Scale
from furcate.kernels.draws import Draws
from furcate.kernels.noise_triton import gumbel, words_at, words_of_blocks

__all__ = ["draft_head"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST = 64  # children of a row
_BLOCKS = 256  # of a tile
_NOBODY = tl.constexpr(-(2**63))
_LEAST = tl.constexpr(-1e30)  # a log that is still a number: 0 times it is 0


def draft_head(
    logits_NV: Tensor, draws: Draws, scale: Scale, count: int, token_V: Tensor | None = None
) -> Children:
    """As `furcate.kernels.draft_head.draft_head`, in two launches.

    Args:
        logits_NV: float32, bfloat16 or float16; entries of a row lie dense. Columns past the
            length of `token_V` do not count.
        draws: the noise at the position that each row's children would take, keyed by the
            target's ids.
        scale: of the depth.
        count: C, at most 64.
        token_V: int64, the target's id of each draft id; None: they are the same.
    """
    rows = logits_NV.shape[0]
    vocab = logits_NV.shape[1] if token_V is None else len(token_V)
    assert logits_NV.dtype in _DTYPES and logits_NV.stride(1) == 1
    assert 1 <= count <= min(_MOST, vocab) and vocab <= logits_NV.shape[1]
    assert rows == len(draws.position_T) and rows % len(draws.seed_B) == 0
    assert draws.dense
    each = rows // len(draws.seed_B)
    tiles = triton.cdiv(vocab, 4 * _BLOCKS)
    lanes = max(2, triton.next_power_of_2(count))
    key_NXC = draws.seed_B.new_empty((rows, tiles, lanes))
    sums_NX3 = draws.temperature_B.new_empty((rows, tiles, 3))
    _best_of_tile[(rows, tiles)](
        logits_NV,
        token_V,
        draws.temperature_B,
        draws.seed_B,
        draws.choice_B,
        draws.position_T,
        key_NXC,
        sums_NX3,
        each,
        vocab,
        logits_NV.stride(0),
        scale.beta,
        scale.sigma,
        scale.floor,
        Q=_BLOCKS,
        C=lanes,
        num_warps=4,
        enable_fp_fusion=False,  # scores round as the torch path has them
    )
    word_NC = draws.seed_B.new_empty((rows, count))
    weight_NC = draws.temperature_B.new_empty((rows, count))
    entropy_N = draws.temperature_B.new_empty(rows)
    _best_of_row[(rows,)](
        key_NXC,
        sums_NX3,
        draws.temperature_B,
        word_NC,
        weight_NC,
        entropy_N,
        each,
        tiles,
        count,
        scale.sigma,
        scale.floor,
        C=lanes,
        X=triton.next_power_of_2(tiles),
        num_warps=4,
    )
    return Children(word_NC, weight_NC, entropy_N)


@triton.jit
def _best_of_tile(
    logits_ptr,
    token_ptr,
    temperature_ptr,
    seed_ptr,
    choice_ptr,
    position_ptr,
    key_ptr,
    sums_ptr,
    each,
    vocab,
    stride,
    beta,
    sigma,
    floor,
    Q: tl.constexpr,
    C: tl.constexpr,
):
    """Of one tile: the best C as sort keys, the best score, and the sums that make a law of all."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    request = row // each
    temperature = tl.load(temperature_ptr + request)
    block_Q = tile * Q + tl.arange(0, Q)
    word_Q4 = block_Q[:, None] * 4 + tl.arange(0, 4)
    used_Q4 = word_Q4 < vocab
    logits_ptr += row.to(tl.int64) * stride
    score_Q4 = tl.load(logits_ptr + word_Q4, mask=used_Q4, other=0.0).to(tl.float32) * beta
    if temperature > 0:
        seed = tl.load(seed_ptr + request)
        choice = tl.load(choice_ptr + request)
        position = tl.load(position_ptr + row)
        if token_ptr is None:
            random_Q4 = words_of_blocks(seed, position, choice, block_Q)
        else:
            token_Q4 = tl.load(token_ptr + word_Q4, mask=used_Q4, other=0).to(tl.int32)
            random_Q4 = words_at(seed, position, choice, token_Q4)
        score_Q4 += gumbel(random_Q4) * temperature
    score_Q4 = tl.where(score_Q4 == score_Q4, score_Q4, float("inf"))

    score_Q4 = tl.where(used_Q4, score_Q4, float("-inf"))
    best = tl.max(tl.max(score_Q4, 1), 0)
    origin = tl.where(best == float("-inf"), 0.0, best)  # nothing but -inf: sums of 0
    log_Q4 = (score_Q4 - origin) / tl.maximum(sigma * temperature, floor)
    chance_Q4 = tl.exp(log_Q4)
    part_Q4 = chance_Q4 * tl.maximum(log_Q4, _LEAST)
    sums_ptr += (row * tl.num_programs(1) + tile) * 3
    tl.store(sums_ptr, best)
    tl.store(sums_ptr + 1, tl.sum(tl.sum(chance_Q4, 1), 0))
    tl.store(sums_ptr + 2, tl.sum(tl.sum(part_Q4, 1), 0))

    key_Q4 = tl.where(used_Q4, _key(score_Q4, word_Q4), _NOBODY)
    key_C = tl.topk(key_Q4.reshape(4 * Q), C)
    tl.store(key_ptr + (row * tl.num_programs(1) + tile) * C + tl.arange(0, C), key_C)


@triton.jit
def _best_of_row(
    key_ptr,
    sums_ptr,
    temperature_ptr,
    word_ptr,
    weight_ptr,
    entropy_ptr,
    each,
    tiles,
    count,
    sigma,
    floor,
    C: tl.constexpr,
    X: tl.constexpr,
):
    row = tl.program_id(0)
    m_M = tl.arange(0, X * C)
    key_M = tl.load(key_ptr + row * tiles * C + m_M, mask=m_M < tiles * C, other=_NOBODY)
    key_C = tl.topk(key_M, C)
    score_C = _score_of(key_C)

    x_X = tl.arange(0, X)
    sums_X = sums_ptr + (row * tiles + x_X) * 3
    best_X = tl.load(sums_X, mask=x_X < tiles, other=float("-inf"))
    sum_X = tl.load(sums_X + 1, mask=x_X < tiles, other=0.0)
    part_X = tl.load(sums_X + 2, mask=x_X < tiles, other=0.0)
    spread = tl.maximum(sigma * tl.load(temperature_ptr + row // each), floor)
    best = tl.max(best_X, 0)
    behind_X = tl.where(best_X == float("-inf"), float("-inf"), (best_X - best) / spread)
    share_X = tl.exp(behind_X)
    total = tl.sum(share_X * sum_X, 0)
    inner_X = share_X * (part_X + tl.maximum(behind_X, _LEAST) * sum_X)

    c_C = tl.arange(0, C)
    weight_C = (score_C - best) / spread - tl.log(total)
    out_C = row * count + c_C
    tl.store(word_ptr + out_C, 0xFFFFFFFF - (key_C & 0xFFFFFFFF), mask=c_C < count)
    tl.store(weight_ptr + out_C, weight_C, mask=c_C < count)
    tl.store(entropy_ptr + row, tl.log(total) - tl.sum(inner_X, 0) / total)


@triton.jit
def _key(score, word):
    """int64, larger for what is taken first: by score, then the lower id. The score's own bits."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0 equals 0
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (order << 32) | (0xFFFFFFFF - word.to(tl.int64))


@triton.jit
def _score_of(key):
    order = (key >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)
