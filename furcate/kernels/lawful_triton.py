"""Bias, penalties and masks in one pass, and the floors of top_k, top_p and min_p without a sort.

Twin of `verify.process` up to the noise. Legend: B requests, R rows of a draft, T = B * R flat
rows, V vocabulary, Q tokens of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from furcate.kernels.draft import Draft
from furcate.kernels.lawful import Edits, Filters, Limited

__all__ = ["limit"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_EDITED = 1024  # tokens of a program that edits
_SEARCHED = 2048  # tokens that 16 warps look at together; so few left are put aside
_LARGEST = tl.constexpr(3.4028234663852886e38)
_ORDER = tl.constexpr(0x7FFFFFFF)


def limit(logits_BRV: Tensor, draft: Draft, edits: Edits, filters: Filters) -> Limited:
    """Scores that the law leaves; see `Limited`. The caller's logits are not written to.

    Args:
        logits_BRV: float32, bfloat16 or float16, dense.
        draft: whose rows they are.
        edits: all tensors dense.
        filters: all tensors dense.
    """
    assert logits_BRV.dtype in _DTYPES and logits_BRV.is_contiguous()
    if edits:
        logits_BRV = _edited(logits_BRV, draft, edits, clamp=edits.masks and not filters)
    return Limited(logits_BRV, _floors(logits_BRV, filters) if filters else None)


def _edited(logits_BRV: Tensor, draft: Draft, edits: Edits, *, clamp: bool) -> Tensor:
    batch, rows, vocab = logits_BRV.shape
    out_BRV = torch.empty(logits_BRV.shape, dtype=torch.float32, device=logits_BRV.device)
    how = edits.penalties
    _edit[(batch * rows, triton.cdiv(vocab, _EDITED))](
        logits_BRV,
        out_BRV,
        edits.bias_BV,
        None if how is None else how.repetition_B,
        None if how is None else how.presence_B,
        None if how is None else how.frequency_B,
        None if how is None else how.prompt_BV.view(torch.uint8),
        None if how is None else how.counts_BV,
        draft.tokens_BR.contiguous(),
        draft.parent_BR.contiguous(),
        draft.depth_BR.contiguous(),
        None if edits.allowed_BV is None else edits.allowed_BV.view(torch.uint8),
        None if edits.going_BV is None else edits.going_BV.view(torch.uint8),
        None if edits.bars_BR is None else edits.bars_BR.view(torch.uint8),
        rows,
        vocab,
        CLAMP=clamp,
        Q=_EDITED,
        num_warps=4,
        enable_fp_fusion=False,  # rounds as the torch path does
    )
    return out_BRV


@triton.jit(do_not_specialize=["each"])
def _edit(
    logits_ptr,
    out_ptr,
    bias_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    prompt_ptr,
    counts_ptr,
    tokens_ptr,
    parent_ptr,
    depth_ptr,
    allowed_ptr,
    going_ptr,
    bars_ptr,
    each,
    vocab,
    CLAMP: tl.constexpr,
    Q: tl.constexpr,
):
    """One tile of one row."""
    row = tl.program_id(0).to(tl.int64)
    request = row // each
    token_Q = tl.program_id(1) * Q + tl.arange(0, Q)
    inside_Q = token_Q < vocab
    at_Q = row * vocab + token_Q
    of_request_Q = request * vocab + token_Q
    score_Q = tl.load(logits_ptr + at_Q, mask=inside_Q, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        score_Q += tl.load(bias_ptr + of_request_Q, mask=inside_Q, other=0.0)
    if repetition_ptr is not None:
        count_Q = tl.load(counts_ptr + of_request_Q, mask=inside_Q, other=0)
        node = row
        for _ in range(tl.load(depth_ptr + row).to(tl.int32)):  # up to the root, which is counted
            count_Q += tl.load(tokens_ptr + node) == token_Q
            node = request * each + tl.load(parent_ptr + node)
        written_Q = count_Q > 0
        seen_Q = written_Q | (tl.load(prompt_ptr + of_request_Q, mask=inside_Q, other=0) != 0)
        repetition_Q = tl.where(seen_Q, tl.load(repetition_ptr + request), 1.0)
        divided_Q = tl.div_rn(score_Q, repetition_Q)
        score_Q = tl.where(score_Q > 0, divided_Q, score_Q * repetition_Q)
        often_Q = tl.load(frequency_ptr + request) * count_Q.to(tl.float32)
        score_Q -= often_Q + tl.load(presence_ptr + request) * written_Q.to(tl.float32)
    if CLAMP:
        score_Q = tl.where(score_Q < -_LARGEST, -_LARGEST, score_Q)
    kept_Q = inside_Q
    if allowed_ptr is not None:
        kept_Q = tl.load(allowed_ptr + of_request_Q, mask=inside_Q, other=0) != 0
    if going_ptr is not None:
        going_Q = tl.load(going_ptr + of_request_Q, mask=inside_Q, other=0) != 0
        kept_Q = kept_Q & (going_Q | (tl.load(bars_ptr + row) == 0))
    score_Q = tl.where(kept_Q, score_Q, float("-inf"))
    tl.store(out_ptr + at_Q, score_Q, mask=inside_Q)


def _floors(logits_BRV: Tensor, filters: Filters) -> Tensor:
    batch, rows, vocab = logits_BRV.shape
    floor_BR = torch.empty((batch, rows), dtype=torch.float32, device=logits_BRV.device)
    tile = min(_SEARCHED, triton.next_power_of_2(vocab))
    _floor[(batch * rows,)](
        logits_BRV,
        filters.temperature_B,
        filters.top_k_B,
        filters.top_p_B,
        filters.min_p_B,
        floor_BR,
        logits_BRV.new_empty((batch * rows, tile)),
        rows,
        vocab,
        Q=tile,
        num_warps=16,
        enable_fp_fusion=False,
    )
    return floor_BR


@triton.jit(do_not_specialize=["each"])
def _floor(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    floor_ptr,
    few_ptr,
    each,
    vocab,
    Q: tl.constexpr,
):
    """The value that one row's scores must reach; tokens of -inf are nobody's."""
    row = tl.program_id(0).to(tl.int64)
    request = row // each
    temperature = tl.load(temperature_ptr + request)
    logits_ptr += row * vocab
    few_ptr += row * Q
    most_Q = tl.full([Q], float("-inf"), tl.float32)
    least_Q = tl.full([Q], float("inf"), tl.float32)
    count_Q = tl.zeros([Q], tl.int32)
    for start in range(0, vocab, Q):
        score_Q = _scores(logits_ptr, start, vocab, Q)
        real_Q = score_Q > float("-inf")
        most_Q = tl.maximum(most_Q, score_Q)
        least_Q = tl.minimum(least_Q, tl.where(real_Q, score_Q, float("inf")))
        count_Q += real_Q.to(tl.int32)
    most, least, count = tl.max(most_Q, 0), tl.min(least_Q, 0), tl.sum(count_Q, 0)
    floor = tl.full([], float("-inf"), tl.float32)
    sound = tl.abs(most) < float("inf")
    if sound & (temperature > 0):
        if top_k_ptr is not None:
            top_k = tl.load(top_k_ptr + request)
            if (top_k > 0) & (top_k < vocab) & (top_k <= count):
                want = top_k.to(tl.float32)
                floor = _reaching(logits_ptr, few_ptr, vocab, want, least, most, 0.0, True, Q)
        if top_p_ptr is not None:
            top_p = tl.load(top_p_ptr + request)
            if top_p < 1:
                low = tl.maximum(least, floor)
                cold = tl.minimum(1 / temperature, _LARGEST)
                want = top_p * _mass_from(logits_ptr, vocab, low, most, cold, Q)
                floor = _reaching(logits_ptr, few_ptr, vocab, want, low, most, cold, False, Q)
        if min_p_ptr is not None:
            share = tl.load(min_p_ptr + request)
            floor = tl.maximum(floor, most + temperature * tl.log(share))
    tl.store(floor_ptr + row, tl.where(sound, floor, float("nan")))


@triton.jit
def _reaching(
    scores_ptr,
    few_ptr,
    vocab,
    want,
    least,
    most,
    cold,
    COUNTED: tl.constexpr,
    Q: tl.constexpr,
):
    """The largest score of which, with all above it, there is `want` or more; at least `least`.

    Counted, or weighed by exp((score - most) * cold). A search between two bounds, over as soon as
    they meet; once a tile holds all scores from the lower one on, the others are not read again.
    """
    low, high = _ordered(least), _ordered(most)
    left = tl.full([], vocab, tl.int32)
    while (low < high) & (left > Q):
        low, high, left = _closer(scores_ptr, vocab, low, high, want, most, cold, COUNTED, Q)
    if low < high:
        _put_aside(scores_ptr, few_ptr, vocab, _float(low), Q)
        while low < high:
            low, high, left = _closer(few_ptr, Q, low, high, want, most, cold, COUNTED, Q)
    return _float(low)


@triton.jit
def _closer(
    scores_ptr, length, low, high, want, most, cold, COUNTED: tl.constexpr, Q: tl.constexpr
):
    """(bounds that are closer, how many scores there are from the lower one of before on).

    Three pivots split them by value, which is quick on logits, and one by the bits of a float,
    which ends the search within 32 passes on anything. They are drawn to scores that exist.
    """
    bottom, ceiling = _float(low), _float(high)
    a = _within(_ordered(bottom * 0.75 + ceiling * 0.25), low, high)
    b = _within(_ordered(bottom * 0.5 + ceiling * 0.5), low, high)
    c = _within(_ordered(bottom * 0.25 + ceiling * 0.75), low, high)
    d = low + ((high - low + 1) >> 1)
    from_a, from_b, from_c, from_d = _float(a), _float(b), _float(c), _float(d)
    mass_a_Q = tl.zeros([Q], tl.float32)
    mass_b_Q = tl.zeros([Q], tl.float32)
    mass_c_Q = tl.zeros([Q], tl.float32)
    mass_d_Q = tl.zeros([Q], tl.float32)
    least_Q = tl.full([Q], float("inf"), tl.float32)
    most_Q = tl.full([Q], float("-inf"), tl.float32)
    left_Q = tl.zeros([Q], tl.int32)
    for start in range(0, length, Q):
        score_Q = _scores(scores_ptr, start, length, Q)
        mass_Q = _masses(score_Q, most, cold, COUNTED, Q)
        mass_a_Q += tl.where(score_Q >= from_a, mass_Q, 0.0)
        mass_b_Q += tl.where(score_Q >= from_b, mass_Q, 0.0)
        mass_c_Q += tl.where(score_Q >= from_c, mass_Q, 0.0)
        mass_d_Q += tl.where(score_Q >= from_d, mass_Q, 0.0)
        left_Q += (score_Q >= bottom).to(tl.int32)
        least_Q = tl.minimum(least_Q, tl.where(score_Q >= bottom, score_Q, float("inf")))
        most_Q = tl.maximum(most_Q, tl.where(score_Q <= ceiling, score_Q, float("-inf")))
    low = tl.maximum(low, _ordered(tl.min(least_Q, 0)))
    high = tl.minimum(high, _ordered(tl.max(most_Q, 0)))
    low, high = _narrowed(low, high, a, tl.sum(mass_a_Q, 0) >= want)
    low, high = _narrowed(low, high, b, tl.sum(mass_b_Q, 0) >= want)
    low, high = _narrowed(low, high, c, tl.sum(mass_c_Q, 0) >= want)
    low, high = _narrowed(low, high, d, tl.sum(mass_d_Q, 0) >= want)
    return low, high, tl.sum(left_Q, 0)


@triton.jit
def _put_aside(scores_ptr, few_ptr, vocab, low, Q: tl.constexpr):
    """Copy the scores from `low` on, Q at most, and -inf behind them."""
    tl.store(few_ptr + tl.arange(0, Q), tl.full([Q], float("-inf"), tl.float32))
    tl.debug_barrier()
    count = 0
    for start in range(0, vocab, Q):
        score_Q = _scores(scores_ptr, start, vocab, Q)
        kept_Q = (score_Q >= low).to(tl.int32)
        place_Q = count + tl.cumsum(kept_Q, 0) - 1
        tl.store(few_ptr + place_Q, score_Q, mask=kept_Q != 0)
        count += tl.sum(kept_Q, 0)
    tl.debug_barrier()


@triton.jit
def _mass_from(logits_ptr, vocab, low, most, cold, Q: tl.constexpr):
    """The weight of all scores from `low` on, summed as `_reaching` does."""
    mass_Q = tl.zeros([Q], tl.float32)
    for start in range(0, vocab, Q):
        score_Q = _scores(logits_ptr, start, vocab, Q)
        weight_Q = _masses(score_Q, most, cold, False, Q)
        mass_Q += tl.where(score_Q >= low, weight_Q, 0.0)
    return tl.sum(mass_Q, 0)


@triton.jit
def _masses(score_Q, most, cold, COUNTED: tl.constexpr, Q: tl.constexpr):
    """What each score weighs, float32: 1, or its odds against the best."""
    if COUNTED:
        return tl.full([Q], 1.0, tl.float32)
    return tl.exp((score_Q - most) * cold)


@triton.jit
def _scores(logits_ptr, start, vocab, Q: tl.constexpr):
    """float32 [Q]; NaN as infinity, -inf behind the last token."""
    token_Q = start + tl.arange(0, Q)
    score_Q = tl.load(logits_ptr + token_Q, mask=token_Q < vocab, other=float("-inf"))
    score_Q = score_Q.to(tl.float32)
    return tl.where(score_Q == score_Q, score_Q, float("inf"))


@triton.jit
def _narrowed(low, high, pivot, enough):
    """The bounds once it is known whether there is enough from `pivot` on."""
    low = tl.where(enough, tl.maximum(low, pivot), low)
    return low, tl.where(enough, high, tl.minimum(high, pivot - 1))


@triton.jit
def _within(pivot, low, high):
    return tl.minimum(tl.maximum(pivot, low + 1), high)


@triton.jit
def _ordered(value):
    """int64 of the same order as the floats; -0.0 stands right below 0.0."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & _ORDER)).to(tl.int64)


@triton.jit
def _float(order):
    """`_ordered` undone."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & _ORDER)).to(tl.float32, bitcast=True)
