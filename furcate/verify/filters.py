"""top_k, top_p and min_p as thresholds on the logits: no sort, ties at the threshold kept.

Each filter sees softmax(logits / T), renormalised over the survivors of the filter before it, in
the order top_k, top_p, min_p. (min_p compares with the largest probability, so renormalising does
not matter to it.) Legend: B requests, R rows, V vocabulary, K largest values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from furcate.verify.law import Law

__all__ = ["floor_of", "threshold"]

# Up to this k a partial sort is cheaper than three passes over the vocabulary.
SMALL_K = 128
# Probabilities are summed as whole numbers of 2**-40: exact, so in any order, on any device.
UNIT = 2.0**40
# Bits of a digit in the search: most and fewest.
DIGITS = (11, 4)


def floor_of(logits_BRV: Tensor, law: Law) -> Tensor:
    """The value that a logit must reach to survive, [B, R, 1] in the logits' dtype.

    Forbidden tokens have logit -inf. Greedy requests are not filtered (-inf); a row whose largest
    logit is not finite has floor NaN, which nothing reaches.
    """
    most_BR1 = logits_BRV.amax(-1, keepdim=True)
    floor_BR1 = torch.full_like(most_BR1, -torch.inf)
    if law.needs.top_k:
        floor_BR1 = _top_k(logits_BRV, law)
    if law.needs.top_p:
        floor_BR1 = torch.maximum(floor_BR1, _top_p(logits_BRV, floor_BR1, law))
    if law.needs.min_p:
        floor_BR1 = torch.maximum(floor_BR1, _min_p(most_BR1, law))
    floor_BR1 = torch.where(law.temperature_B[:, None, None] > 0, floor_BR1, -torch.inf)
    return torch.where(most_BR1.isfinite(), floor_BR1, torch.nan)


def _top_k(logits_BRV: Tensor, law: Law) -> Tensor:
    assert law.top_k_B is not None
    top_k_B11 = law.top_k_B[:, None, None]
    most, vocab = law.needs.top_k, logits_BRV.shape[-1]
    off_B11 = (top_k_B11 <= 0) | (top_k_B11 >= vocab)
    if most <= min(SMALL_K, vocab):
        largest_BRK = logits_BRV.topk(most, dim=-1).values
        at_B11 = (top_k_B11 - 1).clamp(0, most - 1)
        value_BR1 = largest_BRK.gather(-1, at_B11.expand(-1, logits_BRV.shape[1], -1))
    else:
        one_BRV = torch.ones_like(logits_BRV, dtype=torch.int64)
        value_BR1 = threshold(logits_BRV, one_BRV, top_k_B11.clamp_min(1))
    return torch.where(off_B11, -torch.inf, value_BR1)


def _top_p(logits_BRV: Tensor, floor_BR1: Tensor, law: Law) -> Tensor:
    assert law.top_p_B is not None
    top_p_B11 = law.top_p_B[:, None, None].double()
    survivor_BRV = logits_BRV.masked_fill(logits_BRV < floor_BR1, -torch.inf)
    mass_BRV = (survivor_BRV / _temperature(law, logits_BRV)).softmax(-1).mul_(UNIT).round_().long()
    want_B11 = (top_p_B11 * UNIT).round().long().clamp_min(1)
    return torch.where(top_p_B11 >= 1, -torch.inf, threshold(logits_BRV, mass_BRV, want_B11))


def _min_p(most_BR1: Tensor, law: Law) -> Tensor:
    assert law.min_p_B is not None
    log_B11 = law.min_p_B[:, None, None].to(most_BR1.dtype).log()
    return most_BR1 + _temperature(law, most_BR1) * log_B11


def _temperature(law: Law, like: Tensor) -> Tensor:
    """[B, 1, 1]; 1 for greedy requests, whose floor is not used."""
    temperature_B11 = law.temperature_B[:, None, None].to(like.dtype)
    return torch.where(temperature_B11 > 0, temperature_B11, 1.0)


def threshold(values_BRV: Tensor, mass_BRV: Tensor, want_BR1: Tensor) -> Tensor:
    """The largest v such that the entries with value >= v hold mass `want` or more.

    A radix search over the bits of the values, most significant digit first: three passes in
    float32 and six in float64, for a vocabulary of a thousand tokens or more.

    Args:
        values_BRV: float32 or float64, no NaN (rows with NaN give a meaningless result).
        mass_BRV: int64, at least 0.
        want_BR1: int64, at least 1.

    Returns:
        [B, R, 1] in the values' dtype; -inf where all entries together hold less.
    """
    bits = torch.finfo(values_BRV.dtype).bits
    most, fewest = DIGITS
    step = min(most, max(fewest, values_BRV.shape[-1].bit_length()))  # no more bins than entries
    key_BRV = _flip((values_BRV + 0.0).view(_whole(values_BRV)))  # + 0.0: -0.0 equals 0.0
    prefix_BR1 = torch.zeros_like(key_BRV[..., :1])
    above_BR1 = torch.zeros_like(want_BR1)
    short_BR1 = mass_BRV.sum(-1, keepdim=True) < want_BR1
    for shift in reversed(range(0, bits, step)):
        width = min(step, bits - shift)
        top = shift + width == bits
        half = 2 ** (width - 1) if top else 0  # keys are signed, their first digit is too
        digit_BRV = (key_BRV >> shift) + half if top else (key_BRV >> shift) & (2**width - 1)
        tail = _tail(digit_BRV.long(), mass_BRV, 2**width) + above_BR1
        # tails fall with the digit, so the number that reach it names the last one
        chosen_BR1 = ((tail[..., :-1] >= want_BR1).sum(-1, keepdim=True) - 1).clamp_min(0)
        above_BR1 = tail.gather(-1, chosen_BR1 + 1)
        prefix_BR1 = (prefix_BR1 << width) | (chosen_BR1 - half).to(key_BRV.dtype)
        if shift:
            mass_BRV = mass_BRV.masked_fill((key_BRV >> shift) != prefix_BR1, 0)
    value_BR1 = _flip(prefix_BR1).view(values_BRV.dtype)
    return torch.where(short_BR1, -torch.inf, value_BR1)


def _tail(digit_BRV: Tensor, mass_BRV: Tensor, digits: int) -> Tensor:
    """[B, R, digits + 1]: the mass at each digit or above it; 0 at the end."""
    histogram = mass_BRV.new_zeros((*mass_BRV.shape[:-1], digits + 1))
    histogram.scatter_add_(-1, digit_BRV, mass_BRV)
    return histogram.flip(-1).cumsum(-1).flip(-1)


def _whole(values: Tensor) -> torch.dtype:
    return torch.int64 if values.dtype == torch.float64 else torch.int32


def _flip(bits: Tensor) -> Tensor:
    """Floats' bits to whole numbers of the same order, and back: negative ones run backwards."""
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)
