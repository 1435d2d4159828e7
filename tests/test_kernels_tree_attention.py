"""Tree attention over pages, against dense attention with a mask found by climbing.

Legend: B requests, R rows, T = B * R flat rows, S slots, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import Layout, ancestors, as_chain, causal, dense_attention, layout
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from furcate.kernels.draft import Draft
from furcate.kernels.tree_attention import (
    SCRATCH,
    Columns,
    Keys,
    Places,
    Sight,
    behind,
    lay_out,
    packed,
    tree_attention,
)
from furcate.kv.cache import CacheShape, PagedCache

# float64: as asked for; float32: about twice the worst (9.1e-7) of 2,000 random passes
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
NAN = float("nan")


@dataclass
class Pass:
    """One pass over random keys; what is not the requests' own is NaN, scratch excepted."""

    where: Layout
    dtype: torch.dtype
    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    prefix: list[Keys]  # of each request, [L, K, D]
    pool: Keys
    more: int = 0  # columns beyond what is needed
    in_place: bool = False

    def sight(self) -> Sight:
        where = self.where
        columns, run = where.columns + self.more, None
        if self.in_place:  # as a round does: the longest request and all rows
            columns = int(where.length_B.max()) + where.draft.tokens_BR.shape[1]
            run = where.slot(0, 0)
        places = Places(where.table_BP, where.length_B, where.page_size, columns, run)
        return behind(places, where.draft.end_BR, where.draft.live_B)

    def columns(self) -> Columns:
        return lay_out(self.sight(), self.dtype)

    def seen(self, columns: Columns) -> Columns:
        return packed(columns, self.q_THD.shape[1] // self.k_TKD.shape[1])

    def run(self) -> Tensor:
        """Write the rows' keys and attend: [B, R, H, D]."""
        columns, slot_T = self.columns(), self.sight().write_T
        self.pool.k_SKD.index_copy_(0, slot_T, self.k_TKD)
        self.pool.v_SKD.index_copy_(0, slot_T, self.v_TKD)
        out_THD = tree_attention(self.q_THD, self.pool, self.seen(columns))
        return out_THD.view(*self.where.draft.tokens_BR.shape, *out_THD.shape[1:])

    def naive(self, b: int) -> Tensor:
        """Dense attention in float64 of the live rows of request b."""
        draft, live = self.where.draft, int(self.where.draft.live_B[b])
        rows = draft.tokens_BR.shape[1]
        mine = slice(b * rows, b * rows + live)
        length = len(self.prefix[b].k_SKD)
        seen_RS = torch.zeros(live, length + live, dtype=torch.bool)
        seen_RS[:, :length] = True
        for row in range(live):
            seen_RS[row, [length + j for j in ancestors(draft, b, row)]] = True
        k = torch.cat([self.prefix[b].k_SKD, self.k_TKD[mine]]).double()
        v = torch.cat([self.prefix[b].v_SKD, self.v_TKD[mine]]).double()
        return dense_attention(self.q_THD[mine].double(), k, v, seen_RS)

    def worst(self, out_BRHD: Tensor) -> float:
        """The largest distance of a live row from the naive one; NaN counts as infinite."""
        worst = 0.0
        for b, live in enumerate(self.where.draft.live_B.tolist()):
            gap = (out_BRHD[b, :live].double() - self.naive(b)).abs().nan_to_num(nan=torch.inf)
            worst = max(worst, float(gap.max()))
        return worst


def random_pass(
    where: Layout, dtype: torch.dtype, seed: int, heads: tuple[int, int] = (4, 2), size: int = 8
) -> Pass:
    rng = torch.Generator().manual_seed(seed)
    query, kv = heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=dtype)

    flat = where.draft.tokens_BR.numel()
    slots = (where.pages + 1) * where.page_size
    pool = Keys(*(torch.full((slots, kv, size), NAN, dtype=dtype) for _ in "kv"))
    pool.k_SKD[: where.page_size] = 1e3 * normal(where.page_size, kv, size)
    pool.v_SKD[: where.page_size] = 1e3 * normal(where.page_size, kv, size)
    prefix = []
    for b, length in enumerate(where.length_B.tolist()):
        prefix.append(Keys(normal(length, kv, size), normal(length, kv, size)))
        pool.k_SKD[where.slots(b, length)] = prefix[b].k_SKD
        pool.v_SKD[where.slots(b, length)] = prefix[b].v_SKD
    q_THD, k_TKD = normal(flat, query, size), normal(flat, kv, size)
    return Pass(where, dtype, q_THD, k_TKD, normal(flat, kv, size), prefix, pool)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    page_size = draw(st.sampled_from([16, 32]))
    near = st.sampled_from([page_size - 1, page_size, page_size + 1, 2 * page_size])
    lengths = draw(st.lists(st.integers(0, 70) | near, min_size=1, max_size=4))
    return layout(draw(st.integers(0, 10**6)), lengths, draw(st.integers(1, 34)), page_size)


HEADS = [(1, 1), (4, 4), (4, 2), (6, 2), (9, 3), (8, 1)]


@given(
    layouts(),
    st.integers(0, 10**6),
    st.sampled_from(HEADS),
    st.sampled_from([*TOLERANCE]),
    st.data(),
)
@settings(max_examples=120, deadline=None)
def test_every_live_row_is_that_of_dense_attention(
    where: Layout, seed: int, heads: tuple[int, int], dtype: torch.dtype, data: st.DataObject
) -> None:
    case = random_pass(where, dtype, seed, heads, data.draw(st.sampled_from([4, 16])))
    case.more = data.draw(st.sampled_from([0, 1, 40]))
    out_BRHD = case.run()
    assert case.worst(out_BRHD) <= TOLERANCE[dtype]
    assert out_BRHD.isfinite().all(), "pads are finite too"


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64])
@pytest.mark.parametrize("length", [0, 15, 16, 17, 100])
def test_odd_sizes_are_those_of_dense_attention(rows: int, length: int) -> None:
    case = random_pass(layout(rows, [length, 5], rows, 16), torch.float64, length)
    assert case.worst(case.run()) <= TOLERANCE[torch.float64]


def bushy_pass() -> Pass:
    return random_pass(layout(3, [21, 40], 24, 16), torch.float64, 3)


def test_the_comparison_can_fail() -> None:
    right = bushy_pass()
    assert right.worst(right.run()) <= 1e-12
    sees_siblings = bushy_pass()
    columns = sees_siblings.columns()
    chain = as_chain(sees_siblings.where.draft, sees_siblings.where.draft.live_B)
    everything = replace(sees_siblings, where=replace(sees_siblings.where, draft=chain))
    assert sees_siblings.worst(everything.run()) > 1e-3
    assert not torch.equal(columns.bias_BRS, everything.columns().bias_BRS)


def test_a_poisoned_column_does_leak_where_it_is_read() -> None:
    """The twin of the NaN pages above: a masked column still multiplies what it reads by 0."""
    case = bushy_pass()
    columns = case.columns()
    case.run()
    free_slot = int(case.pool.v_SKD[:, 0, 0].isnan().nonzero()[0])
    hidden = columns.read_BS.clone()
    last = int(case.where.length_B[0] + case.where.draft.live_B[0])
    unused = [s for s in range(hidden.shape[1]) if s >= last]
    assert unused, "request 0 must be the shorter one"
    hidden[0, unused[0]] = free_slot
    leaked = tree_attention(case.q_THD, case.pool, case.seen(replace(columns, read_BS=hidden)))
    assert leaked.isnan().any()


def test_what_the_scratch_page_holds_does_not_matter() -> None:
    case = bushy_pass()
    case.more = 9
    before = case.run()
    case.pool.k_SKD[: case.where.page_size] *= -3
    case.pool.v_SKD[: case.where.page_size] += 1e6
    assert torch.equal(case.run(), before)


def chain_case(lengths: list[int], rows: int) -> Pass:
    where = layout(0, lengths, rows, 16)
    full_B = torch.full_like(where.length_B, rows)
    return random_pass(replace(where, draft=as_chain(where.draft, full_B)), torch.float64, 1)


@pytest.mark.parametrize("rows", [1, 2, 16, 40])
def test_a_chain_is_causal_attention(rows: int) -> None:
    case = chain_case([0, 0], rows)
    out_BRHD = case.run()
    for b in range(2):
        mine = slice(b * rows, (b + 1) * rows)
        whole = dense_attention(case.q_THD[mine], case.k_TKD[mine], case.v_TKD[mine], causal(rows))
        assert (out_BRHD[b] - whole).abs().max() <= 1e-12


def test_a_row_does_not_depend_on_its_company() -> None:
    """Alone, without pads and with fewer columns, request 1 sees the same."""
    case = bushy_pass()
    out_BRHD = case.run()
    where, live = case.where, int(case.where.draft.live_B[1])
    cut = {
        name: getattr(where.draft, name)[1:, :live]
        for name in ("tokens_BR", "parent_BR", "depth_BR", "end_BR", "value_BR")
    }
    draft = Draft(**cut, live_B=where.draft.live_B[1:])
    lone = replace(where, draft=draft, length_B=where.length_B[1:], table_BP=where.table_BP[1:])
    rows = where.draft.tokens_BR.shape[1]
    mine = slice(rows, rows + live)
    alone = replace(
        case, where=lone, q_THD=case.q_THD[mine], k_TKD=case.k_TKD[mine], v_TKD=case.v_TKD[mine]
    )
    assert (alone.run()[0] - out_BRHD[1, :live]).abs().max() <= 1e-12


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_rows_are_written_to_their_own_places_and_pads_to_scratch(where: Layout) -> None:
    places = Places(where.table_BP, where.length_B, where.page_size, where.columns + 3)
    draft = where.draft
    sight = behind(places, draft.end_BR, draft.live_B)
    columns = lay_out(sight, torch.float32)
    rows = draft.tokens_BR.shape[1]
    for b, (length, live) in enumerate(
        zip(where.length_B.tolist(), draft.live_B.tolist(), strict=True)
    ):
        own = where.slots(b, length + live)
        written = sight.write_T.view(-1, rows)[b].tolist()
        assert written == own[length:] + [SCRATCH] * (rows - live)
        assert columns.read_BS[b].tolist() == own + [SCRATCH] * (where.columns + 3 - length - live)


def test_the_passes_never_ask_the_device() -> None:
    """Under FakeTensorMode nothing has a value, so reading one raises."""
    case = bushy_pass()
    where, draft, columns = case.where, case.where.draft, case.where.columns
    with FakeTensorMode() as mode:
        fake = mode.from_tensor
        places = Places(fake(where.table_BP), fake(where.length_B), where.page_size, columns)
        laid = lay_out(behind(places, fake(draft.end_BR), fake(draft.live_B)), torch.float64)
        pool = Keys(fake(case.pool.k_SKD), fake(case.pool.v_SKD))
        out_THD = tree_attention(fake(case.q_THD), pool, case.seen(laid))
    assert out_THD.shape == case.q_THD.shape


@pytest.mark.parametrize("rows", [1, 5, 24])
def test_a_lone_request_in_one_run_of_pages_reads_them_in_place(rows: int) -> None:
    """Nothing is gathered, and what a former owner left in its pages does no harm."""
    where = layout(8, [21], rows, 16)
    run = torch.arange(3, 3 + where.table_BP.shape[1])[None]
    case = random_pass(replace(where, table_BP=run), torch.float64, 8)
    case.in_place = True
    assert case.worst(case.run()) <= TOLERANCE[torch.float64]


def test_a_broken_request_does_not_poison_the_scratch_page() -> None:
    """Its pads carry NaN keys; what others read in columns out of use must stay finite."""
    where = layout(5, [20, 3], 12, 16)
    draft = replace(where.draft, live_B=torch.tensor([4, 12]))  # request 0 has pads
    chain = as_chain(draft, draft.live_B)
    where = replace(where, draft=chain)
    shape = CacheShape(layers=1, kv_heads=2, head_dim=8, pages=where.pages, page_size=16)
    cache = PagedCache(shape, torch.float64, torch.device("cpu"))
    case = random_pass(where, torch.float64, 0)
    case.k_TKD[:12], case.v_TKD[:12] = NAN, NAN
    attend = cache.attend(case.sight(), case.q_THD.shape[1])
    for _ in range(2):  # the second pass finds what the first one left behind
        out_BRHD = attend(0, case.q_THD, case.k_TKD, case.v_TKD).view(2, 12, 4, 8)
        assert out_BRHD[1].isfinite().all()
