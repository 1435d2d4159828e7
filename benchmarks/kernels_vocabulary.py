"""Rows of `kernels_gpu.py`: noise, filters and argmax over a vocabulary; children of draft rows.

Legend: B requests, R rows, T = B * R flat rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from gpu_cases import case, poisoned
from gpu_timing import timed
from kernels_bench import Bench
from torch import Tensor

from furcate.kernels.draft_head import draft_head
from furcate.kernels.draws import Draws
from furcate.kernels.lawful import Edits, Filters
from furcate.tree.calibration import DepthScale
from furcate.verify.filters import floor_of
from furcate.verify.law import Law, Needs
from furcate.verify.noise import gumbel_noise

__all__ = ["choosing", "filtering", "proposing"]

Row = dict[str, Any]
SCALE = DepthScale(beta=1.1, sigma=0.9, floor=0.6)
CHILDREN = 8


def choosing(bench: Bench, vocab: int, batch: int, rows: int) -> Row:
    """Noise and argmax of the target."""
    sample = bench.kernels.sample
    if sample is None:
        return {}
    logits_TV, draws = _logits(bench, vocab, batch * rows), bench.draws(batch, rows)
    broken_T = torch.empty(batch * rows, dtype=torch.bool, device=bench.device)
    score_TV = logits_TV.float() + 0.8 * _noise(draws, rows, vocab)
    with poisoned():
        token_T = sample(logits_TV, draws, broken_T.fill_(True), None)
    best_T = score_TV.gather(1, token_T[:, None])[:, 0]
    sound = bool((score_TV.amax(1) - best_T <= 1e-4).all()) and not bool(broken_T.any())
    timing = timed(lambda: sample(logits_TV, draws, broken_T, None), bench.device)
    return bench.row(sound, timing, moved=logits_TV.nbytes)


def filtering(bench: Bench, vocab: int, batch: int, rows: int) -> Row:
    """The floors of top_k, top_p and min_p together, before the noise."""
    limit = bench.kernels.limit
    if limit is None:
        return {}
    logits_TV = _logits(bench, vocab, batch * rows)
    logits_BRV, device = logits_TV.view(batch, rows, vocab), bench.device
    warm_B = torch.full((batch,), 0.9, device=device)
    top_k_B = torch.full((batch,), 50, device=device)
    top_p_B, min_p_B = (torch.full((batch,), x, device=device) for x in (0.95, 0.01))
    filters = Filters(warm_B, top_k_B, top_p_B, min_p_B)
    draft = case(batch, 16, rows, device).draft
    with poisoned():
        floor_BR = limit(logits_BRV, draft, Edits(), filters).floor_BR
    assert floor_BR is not None
    wanted_BR = floor_of(logits_BRV.float(), _law(filters)).view(batch, rows)
    # next to a threshold sums that round otherwise may find the next logit, a step of bf16 away
    sound = bool(((floor_BR - wanted_BR).abs() <= 1e-2 * wanted_BR.abs() + 1e-3).all())
    timing = timed(lambda: limit(logits_BRV, draft, Edits(), filters), bench.device)
    return bench.row(sound, timing, moved=logits_TV.nbytes)


def proposing(bench: Bench, vocab: int, batch: int, rows: int) -> Row:
    """The likeliest children of rows of a draft head, the target's noise among their reasons."""
    head = bench.kernels.draft_head
    if head is None:
        return {}
    total, draws = batch * rows, bench.draws(batch, rows)
    logits_TV = _logits(bench, vocab, total)
    warm_T = torch.full((total,), 0.8, device=bench.device)
    told = draft_head(logits_TV, warm_T, _noise(draws, rows, vocab), SCALE, CHILDREN)
    with poisoned():
        found = head(logits_TV, draws, SCALE, CHILDREN)
    worst = float((found.weight_NC - told.weight_NC).abs().max())
    timing = timed(lambda: head(logits_TV, draws, SCALE, CHILDREN), bench.device)
    return {**bench.row(worst <= 1e-4, timing, moved=logits_TV.nbytes), "worst": worst}


def _logits(bench: Bench, vocab: int, rows: int) -> Tensor:
    """As a product leaves them behind: in the cache where they fit."""
    return bench.random(rows, vocab).mul_(3)


def _noise(draws: Draws, rows: int, vocab: int) -> Tensor:
    seed_T, choice_T = (x.repeat_interleave(rows) for x in (draws.seed_B, draws.choice_B))
    parts = [  # a part at a time: words of 64 bits take their room
        gumbel_noise(seed_T[at], draws.position_T[at][:, None], choice_T[at], vocab)[:, 0]
        for at in torch.arange(len(seed_T), device=seed_T.device).split(64)
    ]
    return torch.cat(parts)


def _law(filters: Filters) -> Law:
    zero_B = torch.zeros_like(filters.temperature_B, dtype=torch.int64)
    return Law(
        needs=Needs(noise=True, top_k=50, top_p=True, min_p=True),
        temperature_B=filters.temperature_B,
        seed_B=zero_B,
        choice_B=zero_B,
        output_B=zero_B,
        stop_BS=zero_B[:, None] - 1,
        top_k_B=filters.top_k_B,
        top_p_B=filters.top_p_B,
        min_p_B=filters.min_p_B,
    )
