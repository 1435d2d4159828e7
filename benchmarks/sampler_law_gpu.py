"""The law of the sampling kernels by chi-square: millions of draws against the exact law.

    python benchmarks/sampler_law_gpu.py --out sampler_law.json

Every draw has a seed or a position of its own, as requests and their tokens have. A vocabulary of
49,152 is put into buckets that the law expects to be hit equally often. A row is sound if p is
above one in a million, and if the same counts speak against a law whose temperature is two per cent
higher (at four million draws; more at fewer): the check can fail. With filters the kernel's floors
come first. Needs the dev extra.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from gpu_report import Report, asked_of, begin, parser_of
from torch import Tensor

from furcate.kernels.backend import Kernels, kernels_of
from furcate.kernels.draws import Draws
from furcate.kernels.lawful import Edits, Filters
from furcate.kernels.select import lone_roots
from furcate.verify.law import Law, Needs, plain_rows
from furcate.verify.process import choose, process

P_MIN = 1e-6
DRAWS = 4_000_000
WRONG = 0.02  # too much temperature, that so many draws must tell
BUCKETS = 512
ELEMENTS = 1 << 28  # scores in one call
VOCABULARIES = (8, 64, 512, 49152)
FILTERS: dict[str, dict[str, float]] = {
    "none": {},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.02},
    "all": {"top_k": 50, "top_p": 0.95, "min_p": 0.01},
}


@dataclass(frozen=True)
class Case:
    """One law."""

    vocab: int
    temperature: float
    filters: dict[str, float]

    @property
    def logits_V(self) -> Tensor:
        """Far from flat."""
        rng = torch.Generator().manual_seed(self.vocab)
        return torch.randn(self.vocab, generator=rng) * 1.7

    def probabilities(self, temperature: float) -> np.ndarray:
        """In float64, filter after filter; ties at a threshold stay."""
        score_V = self.logits_V.double().numpy() / temperature
        kept = np.ones(self.vocab, dtype=bool)
        if "top_k" in self.filters and self.filters["top_k"] < self.vocab:
            kept &= score_V >= np.sort(score_V)[-int(self.filters["top_k"])]
        if "top_p" in self.filters:
            chance_V = _softmax(score_V, kept)
            order = np.argsort(-chance_V)
            before = np.cumsum(chance_V[order]) - chance_V[order]
            kept[order[before >= self.filters["top_p"]]] = False
        if "min_p" in self.filters:
            kept &= score_V >= score_V.max() + np.log(self.filters["min_p"])
        return _softmax(score_V, kept)


def _softmax(score_V: np.ndarray, kept: np.ndarray) -> np.ndarray:
    weight_V = np.where(kept, np.exp(score_V - score_V.max()), 0.0)
    return np.asarray(weight_V / weight_V.sum())


def counted(case: Case, kernels: Kernels, draws: int, device: torch.device) -> np.ndarray:
    """How often each token was drawn: half of the seeds at each of two positions."""
    logits_V = case.logits_V.to(device)
    draw = _by_kernel if kernels.sample is not None else _by_reference
    counts_V = torch.zeros(case.vocab, dtype=torch.int64, device=device)
    step = max(2, min(draws, ELEMENTS // case.vocab if device.type == "cuda" else 20_000))
    for start in range(0, draws, step):
        at_T = torch.arange(start, min(start + step, draws), device=device)
        token_T = draw(case, kernels, logits_V, at_T // 2, 100 + at_T % 2)
        counts_V += torch.bincount(token_T, minlength=case.vocab)
    return counts_V.cpu().numpy()


def _by_kernel(
    case: Case, kernels: Kernels, logits_V: Tensor, seed_T: Tensor, position_T: Tensor
) -> Tensor:
    warm_T = torch.full(seed_T.shape, case.temperature, device=seed_T.device)
    floor_T = None
    if case.filters:
        floor_T = _floor(case, kernels, logits_V).expand(len(seed_T)).contiguous()
    draws = Draws(warm_T, seed_T, torch.zeros_like(seed_T), position_T)
    broken_T = torch.empty(len(seed_T), dtype=torch.bool, device=seed_T.device)
    assert kernels.sample is not None
    token_T = kernels.sample(logits_V.expand(len(seed_T), -1), draws, broken_T, floor_T)
    assert not bool(broken_T.any())
    return token_T


def _floor(case: Case, kernels: Kernels, logits_V: Tensor) -> Tensor:
    """The kernel's own, for the one row that all draws share."""
    filters, limit = _filters(case, 1, logits_V.device), kernels.limit
    assert limit is not None
    root_B = torch.zeros(1, dtype=torch.int64, device=logits_V.device)
    found = limit(logits_V[None, None].contiguous(), lone_roots(root_B), Edits(), filters)
    assert found.floor_BR is not None
    return found.floor_BR.view(1)


def _by_reference(
    case: Case, kernels: Kernels, logits_V: Tensor, seed_T: Tensor, position_T: Tensor
) -> Tensor:
    filters, zero_T = _filters(case, len(seed_T), seed_T.device), torch.zeros_like(seed_T)
    law = Law(
        needs=Needs(
            noise=True,
            top_k=int(case.filters.get("top_k", 0)),
            top_p="top_p" in case.filters,
            min_p="min_p" in case.filters,
        ),
        temperature_B=filters.temperature_B,
        seed_B=seed_T,
        choice_B=zero_T,
        output_B=zero_T,
        stop_BS=zero_T[:, None] - 1,
        top_k_B=filters.top_k_B,
        top_p_B=filters.top_p_B,
        min_p_B=filters.min_p_B,
    )
    rows = plain_rows(zero_T, position_T - 1)
    logits_BRV = logits_V.expand(len(seed_T), 1, -1)
    return choose(process(logits_BRV, law, rows)).token_BR[:, 0]


def _filters(case: Case, batch: int, device: torch.device) -> Filters:
    asked = case.filters

    def of(name: str) -> Tensor | None:
        dtype = torch.int64 if name == "top_k" else torch.float32
        return torch.full((batch,), asked[name], device=device).to(dtype) if name in asked else None

    warm_B = torch.full((batch,), case.temperature, device=device)
    return Filters(warm_B, of("top_k"), of("top_p"), of("min_p"))


def p_value(counts_V: np.ndarray, law_V: np.ndarray) -> float:
    """Of a chi-square test; 0 where a token of probability 0 was drawn.

    Many tokens are put into buckets of equal probability, likeliest first; bins that expect fewer
    than 5 are taken together.
    """
    if counts_V[law_V == 0].any():
        return 0.0
    order = np.argsort(-law_V)
    counts_V, law_V = counts_V[order].astype(float), law_V[order]
    if len(law_V) > BUCKETS:
        bucket = np.minimum((np.cumsum(law_V) * BUCKETS).astype(int), BUCKETS - 1)
        counts_V, law_V = (np.bincount(bucket, x, BUCKETS) for x in (counts_V, law_V))
    expected = law_V * counts_V.sum()
    small = expected < 5
    counts_V, expected = (np.append(x[~small], x[small].sum()) for x in (counts_V, expected))
    counts_V, expected = counts_V[expected > 0], expected[expected > 0]
    distance = float(((counts_V - expected) ** 2 / expected).sum())
    survival: Callable[[float, int], float] = import_module("scipy.stats").chi2.sf
    return float(survival(distance, max(len(counts_V) - 1, 1)))


def row(case: Case, kernels: Kernels, draws: int, device: torch.device) -> dict[str, Any]:
    """One law."""
    counts_V = counted(case, kernels, draws, device)
    p = p_value(counts_V, case.probabilities(case.temperature))
    wrong = p_value(counts_V, case.probabilities(case.temperature * _wrong(draws)))
    return {"draws": draws, "p": p, "p_of_a_wrong_law": wrong, "sound": wrong < P_MIN < p}


def _wrong(draws: int) -> float:
    """What so many draws can tell from 1 as well as DRAWS can tell 1 + WRONG."""
    return 1 + WRONG * (DRAWS / draws) ** 0.5


@torch.inference_mode()
def main() -> None:
    """Print one JSON object; exit with 1 if a law is not kept."""
    parser = parser_of(__doc__)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--vocabularies", nargs="+", type=int, default=list(VOCABULARIES))
    parser.add_argument("--filters", nargs="+", default=list(FILTERS), choices=list(FILTERS))
    asked, device = asked_of(parser, {"draws": 300_000, "vocabularies": [8, 64]})
    report = Report.of("sampler_law_gpu.py", "the sampling kernels' law", device, asked)
    kernels = kernels_of(device)
    report.note(kernels=kernels.name, sound_above=P_MIN, wrong_law_times=_wrong(asked.draws))
    for vocab in asked.vocabularies:
        for name in asked.filters:
            case = Case(vocab, 1.1, FILTERS[name])
            head = {"vocabulary": vocab, "filters": name, "temperature": case.temperature}
            report.run(head, lambda one=case: row(one, kernels, asked.draws, device))
    sys.exit(report.close())


if __name__ == "__main__":
    begin(main)
