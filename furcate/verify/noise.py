"""Counter-based Gumbel noise, keyed by request seed, absolute position, token id and choice.

Legend: B requests, D positions, V vocabulary, K token ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from furcate.kernels.philox import MASK, Counter, philox

__all__ = [
    "ACCEPT",
    "BONUS",
    "DRAFT",
    "RESIDUAL",
    "TARGET",
    "gumbel",
    "gumbel_at",
    "gumbel_noise",
    "uniform",
]

# One stream per use, so that no two draws of different meaning ever share a word.
TARGET, DRAFT, ACCEPT, RESIDUAL, BONUS = range(5)

LARGEST = 1.0 - 2.0**-24


def uniform(words: Tensor) -> Tensor:
    """32-bit words (int64) to float32 in [2**-33, 1 - 2**-24]: (r + 1/2) / 2**32, rounded once."""
    # 2 r + 1 is whole, so the conversion is the only rounding; without the clamp the last 128
    # words would round to 1 and their noise to minus infinity
    return (words * 2 + 1).to(torch.float32).mul_(2.0**-33).clamp_max_(LARGEST)


def gumbel(uniform_: Tensor) -> Tensor:
    """-log(-log1p(-u)) in float32; log1p by Kahan's form, so that every back end has it.

    The winners live where u is near 0, and there this is exact to the last digits.
    """
    rest = 1.0 - uniform_
    exponential = rest.log().neg_().mul_(uniform_).div_(1.0 - rest)
    return torch.where(rest == 1.0, uniform_, exponential).log_().neg_()


def gumbel_noise(
    seed_B: Tensor, position_BD: Tensor, choice_B: Tensor, vocab: int, stream: int = TARGET
) -> Tensor:
    """Noise of the whole vocabulary at each position.

    Args:
        seed_B: int64, the bit pattern of the 64-bit request seeds.
        position_BD: int64, absolute position of the token that is sampled.
        choice_B: int64, index of the choice among the request's `n`.
        vocab: V.
        stream: one of this module's streams.

    Returns:
        float32 [B, D, V], finite.
    """
    block_V4 = torch.arange((vocab + 3) // 4, device=seed_B.device)
    salt = torch.full_like(block_V4[:1], stream)
    counter = Counter(block_V4, position_BD[:, :, None], salt, choice_B[:, None, None])
    words = philox(counter, *_key(seed_B[:, None, None]))
    return gumbel(uniform(words.flatten(2)))[:, :, :vocab]


def gumbel_at(
    seed: Tensor, position: Tensor, choice: Tensor, token_ids: Tensor, stream: int = TARGET
) -> Tensor:
    """The same noise at given token ids only; all arguments broadcast (int64).

    Returns float32 of the common shape, bit-equal to the entries of `gumbel_noise`.
    """
    counter = Counter(token_ids >> 2, position, torch.full_like(position, stream), choice)
    words = philox(counter, *_key(seed))
    word = (token_ids & 3).expand(words.shape[:-1])
    return gumbel(uniform(words.gather(-1, word[..., None]).squeeze(-1)))


def _key(seed: Tensor) -> tuple[Tensor, Tensor]:
    return seed & MASK, (seed >> 32) & MASK
