"""What a pass begins with in Triton: places and embeddings bit for bit, angles to an ulp.

Legend: B requests, R rows.
"""

from __future__ import annotations

import pytest
import torch
from poison import unwritten_numbers_are_poison  # noqa: F401 (a fixture)
from test_kernels_select_triton import random_pool
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.engine.target import chain
from furcate.kernels.arrival import Arrival, Words
from furcate.kernels.arrival_triton import arrive
from furcate.kernels.draft import Draft
from furcate.kernels.select import lone_roots, select
from furcate.kernels.tree_attention import Places, Sight, behind
from furcate.models.rope import Rope
from furcate.models.spec import RopeSpec

pytestmark = [*MARKS, pytest.mark.usefixtures("unwritten_numbers_are_poison")]

CPU = torch.device("cpu")
VOCAB, PAGE = 23, 4
YARN = RopeSpec(1e4, "yarn", factor=4.0, original_max_position=32, attention_factor=1.3)


def draft_of(batch: int, rows: int) -> Draft:
    """Trees that leave pads behind, their tokens within the vocabulary."""
    root_B = torch.arange(batch) % VOCAB
    if rows == 1:
        return lone_roots(root_B)
    pool = random_pool(rows, 2 * rows, batch)
    pool.tokens_BP.remainder_(VOCAB)
    return select(pool, root_B, rows, 1 + (torch.arange(batch) + rows // 2) % rows)


def places_of(batch: int, rows: int, run: int | None) -> Places:
    length_B = torch.arange(batch) * 9001 % 60
    pages = (60 + rows) // PAGE + 1
    table_BP = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1)) + 1
    if run is not None:
        table_BP = table_BP.sort().values
    return Places(table_BP.view(batch, pages), length_B, PAGE, 60 + rows, run)


def found_in(
    places: Places, draft: Draft, words: Words, rope: Rope, dtype: torch.dtype
) -> tuple[Arrival, Sight, Tensor, tuple[Tensor, Tensor]]:
    """The kernel's, and what the torch path makes: sight, embeddings, cosines and sines."""
    there = Words(words.embedding_VC.to(DEVICE, dtype), words.freq_F.to(DEVICE), words.factor)
    where = Places(
        places.table_BP.to(DEVICE),
        places.length_B.to(DEVICE),
        places.page_size,
        places.columns,
        places.run,
    )
    given = (getattr(draft, name) for name in Draft.__slots__)
    moved = Draft(*(None if x is None else x.to(DEVICE) for x in given))
    by = rope((places.length_B[:, None] + draft.depth_BR).flatten())
    x_TC = words.embedding_VC.to(dtype)[draft.tokens_BR.flatten()]
    sight = behind(places, draft.end_BR, draft.live_B)
    return arrive(where, moved, there), sight, x_TC, (by.cos_T1D, by.sin_T1D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("batch", "rows", "width", "size", "run"),
    [(1, 1, 8, 16, None), (3, 1, 48, 10, None), (2, 9, 1500, 16, None), (1, 9, 48, 64, 4)],
)
def test_rows_arrive_as_the_references_do(
    batch: int, rows: int, width: int, size: int, run: int | None, dtype: torch.dtype
) -> None:
    rng = torch.Generator().manual_seed(width)
    rope = Rope(YARN, size, dtype, CPU)
    words = Words(torch.randn(VOCAB, width, generator=rng), rope.freq_F, 1.3)
    draft, places = draft_of(batch, rows), places_of(batch, rows, run)
    found, sight, x_TC, angles = found_in(places, draft, words, rope, dtype)
    assert torch.equal(found.slot_BR.cpu(), sight.slot_BN)
    assert torch.equal(found.next_BR.cpu(), places.length_B[:, None] + draft.depth_BR + 1)
    assert torch.equal(found.x_TC.cpu(), x_TC) and found.x_TC.dtype == dtype
    near = {torch.float32: 3e-7, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    for ours, theirs in zip((found.cos_T1D, found.sin_T1D), angles, strict=True):
        assert ours.dtype == theirs.dtype == dtype and ours.is_contiguous()
        torch.testing.assert_close(ours.cpu(), theirs, atol=near, rtol=0)


def test_angles_far_out_are_as_good_as_near_ones() -> None:
    rope = Rope(RopeSpec(theta=1e4), 64, torch.float32, CPU)
    words = Words(torch.zeros(VOCAB, 8), rope.freq_F, 1.0)
    length_B = torch.tensor([8191, 131071, 1_000_003])
    places = Places(torch.zeros(3, 250_002, dtype=torch.int64), length_B, PAGE, 1_000_004)
    found, _, _, angles = found_in(places, lone_roots(length_B * 0), words, rope, torch.float32)
    for ours, theirs in zip((found.cos_T1D, found.sin_T1D), angles, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=3e-7, rtol=0)


def test_a_stretch_of_a_prompt_and_a_table_that_is_shared_arrive_too() -> None:
    rope = Rope(YARN, 16, torch.float32, CPU)
    rng = torch.Generator().manual_seed(8)
    words = Words(torch.randn(VOCAB, 8, generator=rng), rope.freq_F, 1.3)
    places = places_of(1, 12, None)
    shared = Places(places.table_BP.expand(2, -1), torch.tensor([0, 5]), PAGE, 40)
    text_BW = torch.arange(60).view(2, 30) % VOCAB
    draft = chain(text_BW[:, 7:19], torch.tensor([12, 3]))
    found, sight, x_TC, _ = found_in(shared, draft, words, rope, torch.float32)
    assert torch.equal(found.slot_BR.cpu(), sight.slot_BN)
    assert torch.equal(found.x_TC.cpu(), x_TC)
