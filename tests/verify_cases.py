"""Drafts and laws that the tests of `verify` share.

Legend: B requests, R rows, V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from furcate.kernels.draft import Draft
from furcate.verify.law import Law, Needs, Rows


def draft_of(tokens: Sequence[int], parents: Sequence[int], pads: Sequence[int] = ()) -> Draft:
    """One tree in preorder (`parents[0]` is not read), then pads with the given tokens."""
    live, rows = len(tokens), len(tokens) + len(pads)
    depth = [0] * rows
    end = [i + 1 for i in range(rows)]
    for i in range(1, live):
        depth[i] = depth[parents[i]] + 1
    for i in range(live - 1, 0, -1):
        end[parents[i]] = max(end[parents[i]], end[i])
    parent = [0, *parents[1:], *([0] * len(pads))]
    value = [0.0] * live + [-torch.inf] * len(pads)
    return Draft(
        tokens_BR=torch.tensor([[*tokens, *pads]]),
        parent_BR=torch.tensor([parent]),
        depth_BR=torch.tensor([depth]),
        end_BR=torch.tensor([end]),
        value_BR=torch.tensor([value]),
        live_B=torch.tensor([live]),
    )


def stacked(drafts: Sequence[Draft]) -> Draft:
    """Drafts of equal row counts as one batch."""
    names = [f.name for f in fields(Draft) if f.name != "tag_BR"]
    return Draft(*(torch.cat([getattr(d, name) for d in drafts]) for name in names))


def random_draft(rng: random.Random, rows: int, live: int, depth: int, vocab: int) -> Draft:
    """A tree grown at random in preorder; pads carry tokens that occur in the tree."""
    parents, spine = [0], [0]
    for i in range(1, live):
        del spine[rng.randint(1, min(len(spine), depth)) :]
        parents.append(spine[-1])
        spine.append(i)
    tokens = [rng.randrange(vocab) for _ in range(live)]
    return draft_of(tokens, parents, [rng.choice(tokens) for _ in range(rows - live)])


def path_of(draft: Draft, row: int, request: int = 0) -> list[int]:
    """Rows from below the root down to `row`."""
    path: list[int] = []
    while row:
        path.append(row)
        row = int(draft.parent_BR[request, row])
    return path[::-1]


def law_of(batch: int, vocab: int, **changes: object) -> Law:
    """A law in which everything is off; numbers in `changes` are spread over the batch."""

    def spread(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((batch,), value, dtype=dtype)

    whole = {"seed_B": 1, "choice_B": 0, "output_B": 1, "top_k_B": 0, "min_tokens_B": 0}
    real = {
        "temperature_B": 0.0,
        "top_p_B": 1.0,
        "min_p_B": 0.0,
        "repetition_B": 1.0,
        "presence_B": 0.0,
        "frequency_B": 0.0,
    }
    values: dict[str, object] = {"stop_BS": torch.full((batch, 1), -1)}
    values |= {name: spread(value, torch.int64) for name, value in whole.items()}
    values |= {name: spread(value, torch.float32) for name, value in real.items()}
    values |= {"prompt_BV": torch.zeros(batch, vocab, dtype=torch.bool)}
    values |= {"counts_BV": torch.zeros(batch, vocab, dtype=torch.int64)}
    for name, value in changes.items():
        dtype = torch.int64 if name in whole else torch.float32
        values[name] = spread(value, dtype) if isinstance(value, int | float) else value
    law = Law(**({"needs": Needs()} | values))  # type: ignore[arg-type]
    return law if "needs" in values else replace(law, needs=_needs(law))


def rows_of(draft: Draft, length: int = 7) -> Rows:
    batch = len(draft.live_B)
    return Rows(draft, torch.full((batch,), length), int(draft.depth_BR.max()))


def _needs(law: Law) -> Needs:
    def away(name: str, off: float) -> bool:
        return bool((getattr(law, name) != off).any())

    return Needs(
        noise=away("temperature_B", 0),
        penalties=away("repetition_B", 1) or away("presence_B", 0) or away("frequency_B", 0),
        min_tokens=away("min_tokens_B", 0),
        top_k=0 if law.top_k_B is None else int(law.top_k_B.max()),
        top_p=away("top_p_B", 1),
        min_p=away("min_p_B", 0),
    )


def filtered_law(
    logits: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> list[float]:
    """An oracle: temperature, top_k, top_p and min_p by sorting, one row, float64, ties kept."""
    best = max(logits)
    p = _kept([math.exp((x - best) / temperature) for x in logits], 0.0)
    if 0 < top_k < len(p):
        p = _kept(p, sorted(p, reverse=True)[top_k - 1])
    if top_p < 1:
        mass, floor = 0.0, 0.0
        for value in sorted(p, reverse=True):
            floor = value
            mass += value
            if mass >= top_p:
                break
        p = _kept(p, floor)
    if min_p > 0:
        p = _kept(p, min_p * max(p))
    return p


def _kept(p: Sequence[float], floor: float) -> list[float]:
    left = [x if x >= floor else 0.0 for x in p]
    return [x / sum(left) for x in left]
