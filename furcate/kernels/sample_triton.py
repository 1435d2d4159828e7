"""The target's choice in Triton: the argmax of logits + T * noise, with noise drawn on the fly.

Twin of `verify.choose`, over all tokens or those that reach a floor. Legend: B requests, T rows,
V vocabulary, S shares of it, Q blocks of four tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.draws import Draws
from furcate.kernels.noise_triton import ceiling, gumbel, words_of_blocks

__all__ = ["sample"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PROGRAMS = 512  # enough to fill a large GPU; more of them would only have more to merge
_BLOCKS = 256  # in a tile: 64 registers a thread, so that 1,024 rows run at once on 132 SMs
_NO_TOKEN = tl.constexpr(2**31 - 1)


def sample(
    logits_TV: Tensor,
    draws: Draws,
    broken_T: Tensor | None = None,
    floor_T: Tensor | None = None,
) -> Tensor:
    """The best token of each row, int64 [T]; equal scores go to the lower id.

    Rows are independent: each has its request's seed, and the position that its choice would take
    (a row at depth d below a root at L: L + d + 1).

    Args:
        logits_TV: float32, bfloat16 or float16; entries of a row lie dense.
        draws: the noise.
        broken_T: bool, written: the row holds NaN, or its best score is infinite, and its token
            has no meaning.
        floor_T: float32, tokens with a lower score before the noise are left out; all are, and the
            row is broken, where it is NaN.
    """
    rows, vocab = logits_TV.shape
    assert logits_TV.dtype in _DTYPES and logits_TV.stride(1) == 1 and vocab < 2**31
    assert rows == len(draws.position_T) and rows % len(draws.seed_B) == 0
    assert draws.dense
    tiles = triton.cdiv(vocab, 4 * _BLOCKS)
    shares = min(tiles, triton.cdiv(_PROGRAMS, rows))
    length = triton.cdiv(tiles, shares) * 4 * _BLOCKS
    token_T = torch.empty(rows, dtype=torch.int64, device=logits_TV.device)
    best_TS = torch.empty((rows, shares), dtype=torch.float32, device=logits_TV.device)
    token_TS = torch.empty((rows, shares), dtype=torch.int32, device=logits_TV.device)
    _best_of_share[(rows, shares)](
        logits_TV,
        draws.temperature_B,
        draws.seed_B,
        draws.choice_B,
        draws.position_T,
        floor_T,
        best_TS,
        token_TS,
        rows // len(draws.seed_B),
        vocab,
        logits_TV.stride(0),
        length,
        Q=_BLOCKS,
        num_warps=4,
        enable_fp_fusion=False,  # rounds as the torch path does
    )
    _best_of_row[(rows,)](
        best_TS, token_TS, token_T, broken_T, shares, S=triton.next_power_of_2(shares), num_warps=1
    )
    return token_T


@triton.jit
def _best_of_share(
    logits_ptr,
    temperature_ptr,
    seed_ptr,
    choice_ptr,
    position_ptr,
    floor_ptr,
    best_ptr,
    token_ptr,
    each,
    vocab,
    stride,
    length,
    Q: tl.constexpr,
):
    """The best score of one row in [share * length, (share + 1) * length), and its token.

    The exact noise costs two logarithms and a division per token. Most tiles cannot beat the best
    so far even with an upper bound in its place, and are left at that.
    """
    row = tl.program_id(0)
    share = tl.program_id(1)
    request = row // each
    temperature = tl.load(temperature_ptr + request)
    seed = tl.load(seed_ptr + request)
    choice = tl.load(choice_ptr + request)
    position = tl.load(position_ptr + row)
    logits_ptr += row.to(tl.int64) * stride
    best = float("-inf")
    best_token = 0
    for start in range(share * length, tl.minimum((share + 1) * length, vocab), 4 * Q):
        block_Q = start // 4 + tl.arange(0, Q)
        token_Q4 = start + tl.arange(0, Q)[:, None] * 4 + tl.arange(0, 4)
        score_Q4 = tl.load(logits_ptr + token_Q4, mask=token_Q4 < vocab, other=float("-inf"))
        score_Q4 = score_Q4.to(tl.float32)
        if floor_ptr is not None:
            score_Q4 = tl.where(score_Q4 >= tl.load(floor_ptr + row), score_Q4, float("-inf"))
        # NaN loses every comparison; as infinity it wins, and is told by that
        score_Q4 = tl.where(score_Q4 == score_Q4, score_Q4, float("inf"))
        word_Q4 = tl.zeros([Q, 4], tl.uint32)
        most_Q4 = score_Q4
        if temperature > 0:
            word_Q4 = words_of_blocks(seed, position, choice, block_Q)
            most_Q4 = tl.fma(ceiling(word_Q4), temperature, score_Q4)
        if tl.max(tl.max(most_Q4, 1), 0) > best:
            if temperature > 0:
                score_Q4 += gumbel(word_Q4) * temperature
            here = tl.max(tl.max(score_Q4, 1), 0)
            if here > best:
                tie_Q4 = tl.where(score_Q4 == here, token_Q4, _NO_TOKEN)
                best_token = tl.min(tl.min(tie_Q4, 1), 0)
                best = here
    at = row * tl.num_programs(1) + share
    tl.store(best_ptr + at, best)
    tl.store(token_ptr + at, best_token)


@triton.jit
def _best_of_row(best_ptr, token_ptr, out_ptr, broken_ptr, shares, S: tl.constexpr):
    row = tl.program_id(0)
    s_S = tl.arange(0, S)
    best_S = tl.load(best_ptr + row * shares + s_S, mask=s_S < shares, other=float("-inf"))
    token_S = tl.load(token_ptr + row * shares + s_S, mask=s_S < shares, other=_NO_TOKEN)
    best = tl.max(best_S, 0)
    token = tl.min(tl.where(best_S == best, token_S, _NO_TOKEN), 0)
    tl.store(out_ptr + row, token.to(tl.int64))
    if broken_ptr is not None:
        tl.store(broken_ptr + row, tl.abs(best) == float("inf"))
