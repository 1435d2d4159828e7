"""Philox4x32-10: random words as a pure function of a counter and a key (torch and numpy).

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The words are
the same bits in torch, in numpy and in Triton's `tl.philox`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Counter", "philox", "philox_numpy"]

ROUNDS = 10
MULTIPLY_0, MULTIPLY_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF


class Counter(NamedTuple):
    """The four counter words, each in 0..2**32 - 1; shapes broadcast against each other."""

    c0: Tensor
    c1: Tensor
    c2: Tensor
    c3: Tensor


def philox(counter: Counter, key_0: Tensor, key_1: Tensor) -> Tensor:
    """Four 32-bit words per counter.

    Args:
        counter: int64 tensors.
        key_0: int64, low word of the key, 0..2**32 - 1; broadcasts against the counter.
        key_1: int64, high word.

    Returns:
        int64 [..., 4], each in 0..2**32 - 1, `...` being the common shape.
    """
    c0, c1, c2, c3 = counter
    for turn in range(ROUNDS):
        # int64 products wrap modulo 2**64, so their bits are those of the unsigned product; the
        # low halves keep junk above bit 31, which the next mask takes away
        product_0, product_1 = c0 * MULTIPLY_0, c2 * MULTIPLY_1
        c0 = _mix(product_1, c1, (key_0 + turn * WEYL_0) & MASK)
        c2 = _mix(product_0, c3, (key_1 + turn * WEYL_1) & MASK)
        c1, c3 = product_1, product_0
    # after ten rounds every word depends on every input, so c0 has the common shape
    words = torch.stack([word.expand(c0.shape) for word in (c0, c1, c2, c3)], dim=-1)
    return words.bitwise_and_(MASK)


def _mix(product: Tensor, word: Tensor, key: Tensor) -> Tensor:
    # word and key meet first: in the early rounds both are small, the product is not
    return ((product >> 32) ^ (word ^ key)).bitwise_and_(MASK)


def philox_numpy(
    counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """The textbook form in numpy: counter [..., 4] and key [..., 2] to words [..., 4]."""
    c0, c1, c2, c3 = (counter[..., i] for i in range(4))
    k0, k1 = key[..., 0], key[..., 1]
    low, shift = np.uint64(MASK), np.uint64(32)
    for _ in range(ROUNDS):
        product_0, product_1 = c0 * np.uint64(MULTIPLY_0), c2 * np.uint64(MULTIPLY_1)
        c0, c1 = (product_1 >> shift) ^ c1 ^ k0, product_1 & low
        c2, c3 = (product_0 >> shift) ^ c3 ^ k1, product_0 & low
        k0, k1 = (k0 + np.uint64(WEYL_0)) & low, (k1 + np.uint64(WEYL_1)) & low
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1)
