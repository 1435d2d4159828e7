"""Tree attention in Triton, against its torch twin in float64; unwritten memory and pages are NaN.

Legend: B requests, R rows, T = B * R flat rows, S slots, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from kv_cases import Layout, as_chain, layout
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.kernels import attention_join_triton, tree_attention_triton
from furcate.kernels.tree_attention import (
    Keys,
    Places,
    Sight,
    behind,
    lay_out,
    packed,
    tree_attention,
)
from furcate.kernels.tree_attention_triton import Tile, tile_for
from furcate.kernels.tree_attention_triton import tree_attention as on_device

pytestmark = MARKS

NAN = float("nan")
CPU = torch.device("cpu")
# about twice the worst of 60 random passes of unit variance (float32 8e-7, float16 1e-3; bfloat16
# has eight times float16's rounding); the judge reads the same rounded inputs
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# the interpreter multiplies bfloat16 as the integers that hold its bits
DTYPES = [d for d in TOLERANCE if d != torch.bfloat16 or DEVICE.type == "cuda"]
HEADS = [(1, 1), (4, 2), (9, 3), (8, 1)]


@dataclass
class Pass:
    """One pass over random keys; every slot that no live row may see is NaN."""

    where: Layout
    first: int
    q_THD: Tensor
    pool: Keys

    def sight(self, device: torch.device) -> Sight:
        where, draft = self.where, self.where.draft
        table_BP, length_B = where.table_BP.to(device), where.length_B.to(device)
        places = Places(table_BP, length_B, where.page_size, where.columns)
        return behind(places, draft.end_BR.to(device), draft.live_B.to(device), self.first)

    def run(self, splits: int = 1, tile: Tile | None = None, chunk: int = 0) -> Tensor:
        """[B, R, H, D] on the CPU."""
        pool = Keys(self.pool.k_SKD.to(DEVICE), self.pool.v_SKD.to(DEVICE))
        q_THD = spaced(self.q_THD.to(DEVICE))
        sight = self.sight(DEVICE)
        out_THD = on_device(q_THD, pool, sight, splits=splits, tile=tile, chunk=chunk)
        assert out_THD.dtype == self.q_THD.dtype
        return out_THD.cpu().view(*self.where.draft.tokens_BR.shape, *out_THD.shape[1:])

    def judged(self) -> Tensor:
        """The torch twin in float64, [B, R, H, D]; it must read finite numbers everywhere."""
        columns = lay_out(self.sight(CPU), torch.float64)
        pool = Keys(*(x.double().nan_to_num(0) for x in (self.pool.k_SKD, self.pool.v_SKD)))
        seen = packed(columns, self.q_THD.shape[1] // pool.k_SKD.shape[1])
        out_THD = tree_attention(self.q_THD.double(), pool, seen)
        return out_THD.view(*self.where.draft.tokens_BR.shape, *out_THD.shape[1:])

    def worst(self, out_BRHD: Tensor) -> float:
        """The largest distance of a live row; NaN counts as infinite."""
        live_BR = torch.arange(out_BRHD.shape[1]) < self.where.draft.live_B[:, None]
        gap_BRHD = (out_BRHD.double() - self.judged()).abs().nan_to_num(nan=torch.inf)
        return float(gap_BRHD[live_BR].max())


def spaced(x_THD: Tensor) -> Tensor:
    """The same numbers as part of a wider tensor, as a fused projection has its queries."""
    wide = torch.full((x_THD.shape[0], x_THD.shape[1] + 2, x_THD.shape[2]), NAN)
    wide = wide.to(x_THD.device, x_THD.dtype)
    wide[:, : x_THD.shape[1]] = x_THD
    return wide[:, : x_THD.shape[1]]


def random_pass(
    where: Layout,
    seed: int = 0,
    heads: tuple[int, int] = (4, 2),
    size: int = 16,
    dtype: torch.dtype = torch.float32,
    first: int = 0,
) -> Pass:
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).to(dtype)

    query, kv = heads
    batch, rows = where.draft.tokens_BR.shape
    slots = (where.pages + 1) * where.page_size
    pool = Keys(*(torch.full((slots, kv, size), NAN, dtype=dtype) for _ in "kv"))
    for b, (length, live) in enumerate(
        zip(where.length_B.tolist(), where.draft.live_B.tolist(), strict=True)
    ):
        own = where.slots(b, length + live, first)
        pool.k_SKD[own], pool.v_SKD[own] = normal(len(own), kv, size), normal(len(own), kv, size)
    q_THD = normal(batch * rows, query, size)
    for b, live in enumerate(where.draft.live_B.tolist()):
        q_THD[b * rows + live : (b + 1) * rows] = NAN  # what pads ask does not matter
    return Pass(where, first, q_THD, pool)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 33, 64])
def test_every_live_row_is_that_of_the_reference(rows: int, heads: tuple[int, int]) -> None:
    case = random_pass(layout(rows, [37, 0, 64], rows, 16), rows, heads)
    out_BRHD = case.run()
    assert case.worst(out_BRHD) <= TOLERANCE[torch.float32]
    assert out_BRHD.isfinite().all(), "pads are finite too"


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 63, 64, 65, 130])
@pytest.mark.parametrize("page_size", [16, 128])
def test_borders_of_pages_and_tiles_change_nothing(length: int, page_size: int) -> None:
    case = random_pass(layout(length, [length, 5], 6, page_size), length)
    assert case.worst(case.run()) <= TOLERANCE[torch.float32]
    assert case.worst(case.run(tile=Tile(16, 16))) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 64, 128])
def test_every_dtype_and_head_size_keeps_to_its_tolerance(size: int, dtype: torch.dtype) -> None:
    case = random_pass(layout(1, [70, 9], 12, 16), 1, (9, 3), size, dtype)
    assert case.worst(case.run()) <= TOLERANCE[dtype]
    assert case.worst(case.run(2, Tile(64, 64))) <= TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [65, 90])
def test_rows_that_need_several_tiles_of_128_are_those_of_the_reference(rows: int) -> None:
    case = random_pass(layout(rows, [70, 9], rows, 16), rows, dtype=torch.float16)
    tile = tile_for(2 * rows, 16, torch.float16, 1 << 14)
    assert tile.rows == 128
    assert case.worst(case.run(tile=tile)) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("splits", [2, 3, 8])
@pytest.mark.parametrize("lengths", [[0, 3], [130, 15], [200, 64]], ids=str)
def test_splits_join_to_the_same(splits: int, lengths: list[int]) -> None:
    case = random_pass(layout(splits, lengths, 9, 16), splits)
    out_BRHD = case.run(splits, Tile(16, 32))
    assert case.worst(out_BRHD) <= TOLERANCE[torch.float32]
    assert out_BRHD.isfinite().all()


CUTS = {
    "stretches": Tile(16, 16, in_turn=False),
    "two loops": Tile(16, 16, masked=False),
    "stretches, two loops": Tile(16, 16, in_turn=False, masked=False),
    "never folded": Tile(16, 16, folded=0),
    "rows of 64, folded": Tile(64, 32),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize(("splits", "first"), [(1, 17), (4, 0), (4, 17)])
def test_every_cut_gives_the_same(cut: Tile, first: int, splits: int) -> None:
    case = random_pass(layout(splits, [87, 33], 6, 16), splits, (2, 1), first=first)
    out_BRHD = case.run(splits, cut)
    assert case.worst(out_BRHD) <= TOLERANCE[torch.float32]
    assert out_BRHD.isfinite().all()


@pytest.mark.parametrize("folded", [True, False])
def test_a_split_for_every_step_needs_no_loop(folded: bool) -> None:
    """There are more splits than the shorter request has steps: those of no use stay silent."""
    where = layout(7, [75, 20], 3, 16)
    case = random_pass(where, 7)
    cut = Tile(16, 16, folded=1 << 15 if folded else 0)
    out_BRHD = case.run(-(-where.columns // 16), cut)
    assert case.worst(out_BRHD) <= TOLERANCE[torch.float32]
    assert out_BRHD.isfinite().all()


@pytest.mark.parametrize(("rows", "heads"), [(1, (4, 2)), (5, (3, 1))], ids=str)
def test_the_last_to_arrive_joins_and_leaves_its_tickets_as_they_were(
    rows: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the next launch, or the same one replayed, counts from nothing again."""
    case = random_pass(layout(rows, [60, 15], rows, 16), rows, heads)
    pool = Keys(case.pool.k_SKD.to(DEVICE), case.pool.v_SKD.to(DEVICE))
    q_THD, sight = case.q_THD.to(DEVICE), case.sight(DEVICE)
    apart = on_device(q_THD, pool, sight, splits=4, tile=Tile(16, 16, folded=0))
    monkeypatch.setattr(tree_attention_triton, "join", None)  # no launch of its own
    counts = attention_join_triton.tickets(pool.k_SKD, 1)
    assert counts is not None
    for _ in range(2):
        out_THD = on_device(q_THD, pool, sight, splits=4, tile=Tile(16, 16))
        assert (out_THD - apart).abs().max() <= TOLERANCE[torch.float32]
        assert not counts.any()


def test_tickets_belong_to_a_pool_and_do_not_grow() -> None:
    one, other = (torch.zeros(8, 1, 16, device=DEVICE) for _ in "ab")
    mine = attention_join_triton.tickets(one, 100)
    assert mine is attention_join_triton.tickets(one[4:], 4096)
    assert mine is not attention_join_triton.tickets(other, 1)
    assert attention_join_triton.tickets(one, 4097) is None


@pytest.mark.gpu
def test_a_recorded_pass_replays() -> None:
    case = random_pass(layout(3, [300, 15], 1, 16), 3)
    pool = Keys(case.pool.k_SKD.to(DEVICE), case.pool.v_SKD.to(DEVICE))
    q_THD, sight = case.q_THD.to(DEVICE), case.sight(DEVICE)
    told = on_device(q_THD, pool, sight, splits=5, tile=Tile(16, 64))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_THD = on_device(q_THD, pool, sight, splits=5, tile=Tile(16, 64))
    for _ in range(20):
        out_THD.fill_(NAN)
        graph.replay()
        assert (out_THD - told).abs().max() <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("chunk", [16, 48, 512])
@pytest.mark.parametrize("lengths", [[0, 3], [130, 15], [300, 64, 47]], ids=str)
def test_splits_with_fixed_borders_join_to_the_same(chunk: int, lengths: list[int]) -> None:
    case = random_pass(layout(chunk, lengths, 9, 16), chunk)
    out_BRHD = case.run(tile=Tile(16, 16), chunk=chunk)
    assert case.worst(out_BRHD) <= TOLERANCE[torch.float32]
    assert out_BRHD.isfinite().all()
    late = random_pass(layout(chunk, lengths, 9, 16), chunk, first=1)
    assert late.worst(late.run(tile=Tile(16, 16), chunk=chunk)) <= TOLERANCE[torch.float32]


def test_with_fixed_borders_neither_rows_nor_requests_nor_columns_matter() -> None:
    """More columns only add splits that saw nothing, and these weigh exactly 0."""
    tile, chunk = Tile(16, 16), 16
    where = layout(0, [50, 200], 20, 16, full=True)
    both = random_pass(replace(where, draft=as_chain(where.draft, torch.tensor([20, 20]))))
    whole = both.run(tile=tile, chunk=chunk)[0]
    for rows in (1, 7, 19):
        draft = as_chain(where.draft, torch.tensor([rows, 20]))
        cut = replace(both, where=replace(where, draft=draft))
        assert torch.equal(cut.run(tile=tile, chunk=chunk)[0, :rows], whole[:rows])
    lone = layout(0, [69], 1, 16, full=True)
    last = replace(both, where=replace(lone, table_BP=where.table_BP[:1]), q_THD=both.q_THD[19:20])
    assert torch.equal(last.run(tile=tile, chunk=chunk)[0, 0], whole[19])
    assert not torch.equal(last.run(tile=tile, chunk=32)[0, 0], whole[19]), "other borders are seen"


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("first", [1, 17, 33])
def test_columns_below_the_first_are_hidden_and_never_read(first: int, splits: int) -> None:
    case = random_pass(layout(5, [40, 33, 18], 5, 16), 5, first=first)
    out_BRHD = case.run(splits, Tile(16, 16))
    assert case.worst(out_BRHD) <= TOLERANCE[torch.float32]
    assert out_BRHD.isfinite().all()


@pytest.mark.parametrize("splits", [1, 2])
def test_a_row_that_sees_nothing_gets_zeros(splits: int) -> None:
    case = random_pass(layout(2, [0, 0], 1, 16), first=1)
    assert torch.equal(case.run(splits), torch.zeros(2, 1, 4, 16))
    assert not case.judged().any()


def test_a_chain_of_any_length_gives_its_first_rows_bit_for_bit() -> None:
    """Prefix and tree share their tiles, so a row does not depend on how many rows follow it."""
    where = layout(0, [50], 40, 16, full=True)
    whole = random_pass(replace(where, draft=as_chain(where.draft, torch.tensor([40]))))
    tile = tile_for(40 * 2, 16, torch.float32, 90)
    out_BRHD = whole.run(tile=tile)
    for live in (1, 14, 15, 39):
        cut = replace(
            whole, where=replace(where, draft=as_chain(where.draft, torch.tensor([live])))
        )
        assert torch.equal(cut.run(tile=tile)[:, :live], out_BRHD[:, :live])


def test_plain_decoding_is_a_tree_of_one_row() -> None:
    """The row at L of a pass over L columns, and the last of a chain, are the same row."""
    where = layout(0, [20], 9, 16, full=True)
    chain = random_pass(replace(where, draft=as_chain(where.draft, torch.tensor([9]))))
    tile = Tile(32, 32)
    last = chain.run(tile=tile)[0, 8]
    one = layout(0, [28], 1, 16, full=True)
    lone = replace(chain, where=replace(one, table_BP=where.table_BP), q_THD=chain.q_THD[8:])
    assert torch.equal(lone.run(tile=tile)[0, 0], last)


def frontier(seed: int, lengths: list[int], rows: int, nodes: int, first: int) -> Pass:
    """Rows of a draft level: keys of the tree in places of their own, who sees what at random."""
    where = layout(seed, lengths, nodes, 16, full=True)
    case = random_pass(where, seed, first=first)
    batch = len(lengths)
    case.q_THD = torch.randn(batch * rows, 4, 16, generator=torch.Generator().manual_seed(seed))
    return case


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("rows", "nodes"), [(1, 2), (3, 9), (10, 61)])
def test_a_level_of_a_draft_sees_what_it_is_told(
    rows: int, nodes: int, splits: int, first: int
) -> None:
    """Its columns lie anywhere, and a matrix says who sees them; the rows are the last ones.

    A root that stands at a hidden position is hidden as well.
    """
    lengths = [37, 0, 1, 64]
    case = frontier(nodes, lengths, rows, nodes, first)
    rng = torch.Generator().manual_seed(rows)
    own = torch.tensor([case.where.slots(b, n + nodes, n) for b, n in enumerate(lengths)])
    order = [0, *(1 + torch.randperm(nodes - 1, generator=rng))]  # a hidden root is never read
    slot_BN = own[:, order]
    sees_BRN = torch.rand(4, rows, nodes, generator=rng) < 0.4
    sees_BRN[:, :, 0] = True

    def sight(device: torch.device) -> Sight:
        plain = case.sight(device)
        live_B = torch.full_like(plain.live_B, nodes)
        given = slot_BN.to(device)
        return Sight(plain.places, given, given, live_B, sees_BRN.to(device), first)

    pool = Keys(case.pool.k_SKD.to(DEVICE), case.pool.v_SKD.to(DEVICE))
    out_THD = on_device(case.q_THD.to(DEVICE), pool, sight(DEVICE), splits=splits).cpu()
    fixed_THD = on_device(case.q_THD.to(DEVICE), pool, sight(DEVICE), chunk=64).cpu()
    assert (out_THD - fixed_THD).abs().nan_to_num(nan=torch.inf).max() <= 1e-6
    known = Keys(*(x.double().nan_to_num(0) for x in (case.pool.k_SKD, case.pool.v_SKD)))
    told = tree_attention(case.q_THD.double(), known, packed(lay_out(sight(CPU), torch.float64), 2))
    assert (out_THD - told).abs().nan_to_num(nan=torch.inf).max() <= TOLERANCE[torch.float32]
    sees_BRN[:, :, -1] ^= True
    other = tree_attention(
        case.q_THD.double(), known, packed(lay_out(sight(CPU), torch.float64), 2)
    )
    assert (out_THD - other).abs().max() > 1e-3, "and the comparison can fail"


def test_the_comparison_can_fail() -> None:
    case = random_pass(layout(3, [21, 40], 24, 16), 3)
    assert case.worst(case.run()) <= TOLERANCE[torch.float32]
    chain = as_chain(case.where.draft, case.where.draft.live_B)
    sees_siblings = replace(case, where=replace(case.where, draft=chain))
    assert case.worst(sees_siblings.run()) > 1e-3
    short = replace(case.where, length_B=case.where.length_B - 1)
    assert case.worst(replace(case, where=short).run()) > 1e-3
