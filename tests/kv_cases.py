"""What the tests of kernels and cache share: page tables, forced verdicts, dense keys as judge.

Legend: B requests, R rows, D levels, T tokens, L layers, K key heads, H query heads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from drafter_views import law_of
from torch import Tensor
from verify_cases import path_of, random_draft, stacked

from furcate.drafters.base import Tokens, View
from furcate.kernels.draft import Draft, Verdict
from furcate.kernels.tree_attention import Keys
from furcate.models.decoder import Decoder

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layout:
    """Requests of ragged lengths, their trees, and scattered pages for them."""

    draft: Draft
    length_B: Tensor
    table_BP: Tensor
    page_size: int

    @property
    def pages(self) -> int:
        """Pages in the pool, scratch excluded: some are nobody's."""
        return int(self.table_BP.max()) + 2

    @property
    def columns(self) -> int:
        return int((self.length_B + self.draft.live_B).max())

    def slot(self, b: int, position: int) -> int:
        """Where a position of request b lies, by hand."""
        page = int(self.table_BP[b, position // self.page_size])
        return page * self.page_size + position % self.page_size

    def slots(self, b: int, end: int, start: int = 0) -> list[int]:
        return [self.slot(b, position) for position in range(start, end)]


def layout(
    seed: int,
    lengths: Sequence[int],
    rows: int,
    page_size: int,
    *,
    vocab: int = 50,
    full: bool = False,
) -> Layout:
    """Random trees of `rows` rows, pads among them unless `full`; tables in random order."""
    rng = random.Random(seed)
    lives = [rows if full else rng.randint(1, rows) for _ in lengths]
    trees = [random_draft(rng, rows, live, 6, vocab) for live in lives]
    width = -(-(max(lengths) + rows) // page_size)
    numbers = rng.sample(range(1, len(lengths) * width + 3), len(lengths) * width)
    table_BP = torch.tensor(numbers).view(len(lengths), width)
    return Layout(stacked(trees), torch.tensor(lengths), table_BP, page_size)


def ancestors(draft: Draft, b: int, row: int) -> list[int]:
    """The row itself and all rows above it, found by climbing."""
    return sorted({0, *path_of(draft, row, b)})


def verdict_to(draft: Draft, goals: Sequence[int], counts: Sequence[int] | None = None) -> Verdict:
    """The verdict that accepts the path to one row of each tree; `counts` cuts it shorter."""
    paths = [[0, *path_of(draft, goal, b)] for b, goal in enumerate(goals)]
    deepest = max(1, int(draft.depth_BR.max()))
    path_BD = torch.tensor([path + path[-1:] * (deepest + 1 - len(path)) for path in paths])
    accepted_B = torch.tensor([len(path) - 1 for path in paths])
    count_B = accepted_B + 1 if counts is None else torch.tensor(counts)
    return Verdict(path_BD, torch.zeros_like(path_BD), count_B, accepted_B)


def view_at(where: Layout) -> View:
    batch = len(where.length_B)
    return View(
        slot_B=torch.arange(batch),
        tokens=Tokens(torch.zeros(batch, 1, dtype=torch.int64)),
        length_B=where.length_B,
        table_BS=where.table_BP,
        law=law_of([0.0] * batch),
    )


def dense_keys(decoder: Decoder, tokens: Sequence[int]) -> Keys:
    """Keys and values [L, T, K, D] of a text by one dense causal pass: no pages, no tree."""
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        assert layer == len(keys)
        keys.append(k_TKD.clone())
        values.append(v_TKD.clone())
        return dense_attention(q_THD, k_TKD, v_TKD, causal(len(tokens)))

    decoder(torch.tensor(tokens), torch.arange(len(tokens)), attend)
    return Keys(torch.stack(keys), torch.stack(values))


def causal(rows: int) -> Tensor:
    return torch.ones(rows, rows, dtype=torch.bool).tril()


def dense_attention(q_RHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, seen_RS: Tensor) -> Tensor:
    """Softmax attention written out, one query head at a time."""
    group = q_RHD.shape[1] // k_SKD.shape[1]
    heads = []
    for head in range(q_RHD.shape[1]):
        score_RS = q_RHD[:, head] @ k_SKD[:, head // group].T / q_RHD.shape[2] ** 0.5
        weight_RS = score_RS.masked_fill(~seen_RS, -torch.inf).softmax(-1)
        heads.append(weight_RS @ v_SKD[:, head // group])
    return torch.stack(heads, 1)


def bits(x: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals NaN and 0 differs from -0."""
    return x.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])


def as_chain(draft: Draft, live_B: Tensor) -> Draft:
    """The same tokens with every row below the one before it."""
    r_R = torch.arange(draft.tokens_BR.shape[1])
    live_BR = r_R < live_B[:, None]
    return replace(
        draft,
        parent_BR=torch.where(live_BR, (r_R - 1).clamp_min(0), 0),
        depth_BR=torch.where(live_BR, r_R, 0),
        end_BR=torch.where(live_BR, live_B[:, None], r_R + 1),
        live_B=live_B,
    )
