"""The target's noise inside Triton kernels: the same words, and the formulas of `verify.noise`.

Legend: Q blocks of four tokens, the four words of one Philox call.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["STREAM", "ceiling", "gumbel", "words_at", "words_of_blocks"]

STREAM = tl.constexpr(0)  # the target's own choices
_LARGEST = tl.constexpr(1.0 - 2.0**-24)
_LN2 = 0.6931471805599453
# `ceiling` is off by less than 1e-5 in float32, and `gumbel` by less than that
_SLACK = 1e-4
_CEILING_0 = tl.constexpr(_LN2 * (32 + 127) + _SLACK)
_CEILING_1 = tl.constexpr(-_LN2 * 2.0**-23)


@triton.jit
def words_of_blocks(seed, position, choice, block_Q):
    """uint32 [Q, 4]: the words of tokens 4 * block + 0..3; int32 blocks, int64 scalars."""
    a_Q, b_Q, c_Q, d_Q = _philox(seed, position, choice, block_Q)
    # the last join alternates, so that word 2 * i + j is entry (i, j)
    return tl.join(tl.join(a_Q, c_Q), tl.join(b_Q, d_Q)).reshape(block_Q.shape[0], 4)


@triton.jit
def words_at(seed, position, choice, token_V):
    """uint32 [V]: the word of each token, int32, in any order; one Philox call per token."""
    a_V, b_V, c_V, d_V = _philox(seed, position, choice, token_V >> 2)
    word_V = token_V & 3
    return tl.where(word_V < 2, tl.where(word_V == 0, a_V, b_V), tl.where(word_V == 2, c_V, d_V))


@triton.jit
def _philox(seed, position, choice, block_Q):
    zero_Q = block_Q * 0
    return tl.philox(
        seed, block_Q, zero_Q + position.to(tl.int32), zero_Q + STREAM, zero_Q + choice.to(tl.int32)
    )


@triton.jit
def gumbel(word):
    """float32 -log(-log1p(-u)) with u = (word + 1/2) / 2**32: as torch rounds it, step by step.

    Divided as IEEE has it, and free of fused products if the kernel is launched with
    `enable_fp_fusion=False`.
    """
    u = tl.minimum((word.to(tl.uint64) * 2 + 1).to(tl.float32) * 2.0**-33, _LARGEST)
    rest = 1.0 - u
    tiny = rest == 1.0
    exponential = tl.div_rn(-tl.log(rest) * u, tl.where(tiny, 1.0, 1.0 - rest))
    return -tl.log(tl.where(tiny, u, exponential))


@triton.jit
def ceiling(word):
    """A number not below `gumbel(word)`, and above it by 0.06 where the noise is large; no logs.

    -log(-log1p(-u)) <= -log(u), and the bits of a float, read as an integer, are a chord of its
    base-2 logarithm: never above it.
    """
    bits = word.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.fma(bits.to(tl.float32), _CEILING_1, _CEILING_0)
