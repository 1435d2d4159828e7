"""The law of the sampling kernels by chi-square: millions of draws against the exact law.

    python benchmarks/sampler_law_gpu.py --out sampler_law.json
    python benchmarks/sampler_law_gpu.py --vocabularies 49152 --laws top_p all --ways tree

"plain" draws one token a request, "tree" judges a tree of four rows, each row with a law of its
own, and counts all tokens that are emitted: the law says the same of both. Every draw has a seed or
a position of its own, as requests and their tokens have; seeds are the same in every run. A
vocabulary of 49,152 is put into buckets that the law expects to be hit equally often. A row is
sound if p, corrected for the number of rows (Bonferroni), is above one in a thousand, and if the
same counts speak against a law whose temperature is two per cent higher (at four million draws;
more at fewer): the check can fail. With filters the kernel's floors come first. Needs scipy.

Legend: B requests, R rows, T draws, V vocabulary, D levels below the root.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gpu_report import Report, asked_of, begin, parser_of
from sampler_laws import LAWS, Case
from torch import Tensor

from furcate.kernels.backend import Kernels, kernels_of
from furcate.kernels.draft import Draft
from furcate.kernels.draws import Draws
from furcate.kernels.lawful import Edits, Filters
from furcate.kernels.select import lone_roots
from furcate.verify.coupled import verify
from furcate.verify.law import Law, Needs, Rows, plain_rows
from furcate.verify.process import choose, process

SURE = 1e-3  # least corrected p of a sound row
P_WRONG = 1e-6  # most of a wrong law
DRAWS = 4_000_000
WRONG = 0.02  # too much temperature, that so many draws must tell
ELEMENTS = 1 << 28  # scores in one call
TREE_ELEMENTS = 1 << 38  # scores of all trees of one law: filters look at each of them many times
ON_CPU = 20_000  # draws in one call
VOCABULARIES = (8, 64, 512, 49152)
WAYS = ("plain", "tree")
PARENTS, DEPTHS, ENDS = (0, 0, 1, 0), (0, 1, 2, 1), (4, 3, 3, 4)  # a root, a chain of two, a leaf


def counted(case: Case, kernels: Kernels, draws: int, device: torch.device) -> np.ndarray:
    """How often each token was drawn: half of the seeds at each of two positions."""
    logits_V = case.logits_V.to(device)
    draw = _by_kernel if kernels.sample is not None else _by_reference
    counts_V = torch.zeros(case.vocab, dtype=torch.int64, device=device)
    for at_T in _parts(draws, case.vocab, device):
        token_T = draw(case, kernels, logits_V, at_T // 2, 100 + at_T % 2)
        counts_V += torch.bincount(token_T, minlength=case.vocab)
    return counts_V.cpu().numpy()


def counted_in_trees(case: Case, kernels: Kernels, draws: int, device: torch.device) -> np.ndarray:
    """How often each token was emitted by trees.

    Row r has the law's logits turned by r tokens, and what it emits is turned back. A row that is
    reached draws at a position of its own, so all tokens are drawn from the one law.
    """
    rows, vocab = len(PARENTS), case.vocab
    logits_RV = torch.stack([case.logits_V.roll(r) for r in range(rows)]).to(device)
    counts_V = torch.zeros(vocab, dtype=torch.int64, device=device)
    requests = max(2, min(draws, TREE_ELEMENTS // (vocab * rows)))
    for seed_B in _parts(requests, vocab * rows, device):
        logits_BRV = logits_RV.expand(len(seed_B), -1, -1).contiguous()
        asked = Rows(_trees(case, seed_B), torch.full_like(seed_B, 100), depth=max(DEPTHS))
        told = verify(logits_BRV, _law(case, seed_B), asked, kernels).verdict
        step_D = torch.arange(told.emitted_BD.shape[1], device=device)
        token_BD = (told.emitted_BD - told.path_BD) % vocab
        emitted_T = token_BD[step_D < told.count_B[:, None]]
        counts_V += torch.bincount(emitted_T, minlength=vocab)
    return counts_V.cpu().numpy()


COUNTS = {"plain": counted, "tree": counted_in_trees}


def _parts(count: int, each: int, device: torch.device) -> Iterator[Tensor]:
    """Numbers from 0 on, as many at a time as there is room for, `each` scores for one."""
    step = max(2, ELEMENTS // each if device.type == "cuda" else ON_CPU)
    for start in range(0, count, step):
        yield torch.arange(start, min(start + step, count), device=device)


def _trees(case: Case, seed_B: Tensor) -> Draft:
    """The best tokens of a row below it: the likeliest of root and of row 1, the root's second."""
    best = case.logits_V.topk(2).indices.tolist()
    tokens = (0, best[0], (best[0] + 1) % case.vocab, best[1])

    def same(values: tuple[float, ...], dtype: torch.dtype = torch.int64) -> Tensor:
        row_R = torch.tensor(values, dtype=dtype, device=seed_B.device)
        return row_R.expand(len(seed_B), -1).contiguous()

    value_BR = same(tuple(-float(r) for r in range(len(PARENTS))), torch.float32)
    live_B = torch.full_like(seed_B, len(PARENTS))
    return Draft(same(tokens), same(PARENTS), same(DEPTHS), same(ENDS), value_BR, live_B)


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
    rows = plain_rows(torch.zeros_like(seed_T), position_T - 1)
    logits_BRV = logits_V.expand(len(seed_T), 1, -1)
    return choose(process(logits_BRV, _law(case, seed_T), rows)).token_BR[:, 0]


def _law(case: Case, seed_B: Tensor) -> Law:
    filters, zero_B = _filters(case, len(seed_B), seed_B.device), torch.zeros_like(seed_B)
    needs = Needs(
        noise=case.temperature > 0,
        top_k=int(case.filters.get("top_k", 0)),
        top_p="top_p" in case.filters,
        min_p="min_p" in case.filters,
    )
    return Law(
        needs=needs,
        temperature_B=filters.temperature_B,
        seed_B=seed_B,
        choice_B=zero_B,
        output_B=zero_B,
        stop_BS=zero_B[:, None] - 1,
        top_k_B=filters.top_k_B,
        top_p_B=filters.top_p_B,
        min_p_B=filters.min_p_B,
    )


def _filters(case: Case, batch: int, device: torch.device) -> Filters:
    asked = case.filters

    def of(name: str) -> Tensor | None:
        dtype = torch.int64 if name == "top_k" else torch.float32
        return torch.full((batch,), asked[name], device=device).to(dtype) if name in asked else None

    warm_B = torch.full((batch,), case.temperature, device=device)
    return Filters(warm_B, of("top_k"), of("top_p"), of("min_p"))


def row(
    case: Case, way: str, kernels: Kernels, draws: int, device: torch.device, tests: int
) -> dict[str, Any]:
    """One law, drawn one way."""
    counts_V = COUNTS[way](case, kernels, draws, device)
    drawn = int(counts_V.sum())
    p = case.p_value(counts_V, case.probabilities(case.temperature))
    wrong = case.p_value(counts_V, case.wrong(_wrong(drawn)))
    corrected = min(1.0, p * tests)
    return {
        "draws": drawn,
        "p": p,
        "p_corrected": corrected,
        "p_of_a_wrong_law": wrong,
        "sound": wrong < P_WRONG and corrected > SURE,
    }


def _wrong(draws: int) -> float:
    """What so many draws can tell from 1 as well as DRAWS can tell 1 + WRONG."""
    return 1 + WRONG * (DRAWS / draws) ** 0.5


@torch.inference_mode()
def main() -> None:
    """Print one JSON object; exit with 1 if a law is not kept."""
    parser = parser_of(__doc__)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--vocabularies", nargs="+", type=int, default=list(VOCABULARIES))
    parser.add_argument("--laws", nargs="+", default=list(LAWS), choices=list(LAWS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    asked, device = asked_of(parser, {"draws": 60_000, "vocabularies": [8, 64]})
    if min(asked.vocabularies) < 4 or asked.draws < 1000:
        parser.error("a law of fewer than 4 tokens, or of fewer than 1000 draws, tells nothing")
    report = Report.of("sampler_law_gpu.py", "the sampling kernels' law", device, asked)
    kernels = kernels_of(device)
    tests = len(asked.vocabularies) * len(asked.laws) * len(asked.ways)
    report.note(kernels=kernels.name, tests=tests, sound_above=SURE)
    for vocab in asked.vocabularies:
        for name in asked.laws:
            case = Case(vocab, *LAWS[name])
            for way in asked.ways:
                head = {"vocabulary": vocab, "law": name, "way": way} | {
                    "temperature": case.temperature,
                    **case.filters,
                }
                report.run(
                    head, lambda c=case, w=way: row(c, w, kernels, asked.draws, device, tests)
                )
    found = [row["p_corrected"] for row in report.rows if "p_corrected" in row]
    report.note(smallest_p_corrected=min(found, default=None))
    sys.exit(report.close())


if __name__ == "__main__":
    begin(main)
