"""Moving the accepted path: bitwise, nothing else touched, whatever the tree and the path."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import Layout, bits, layout, verdict_to
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from furcate.kernels.draft import Verdict
from furcate.kernels.kv_move import move_path
from furcate.kernels.tree_attention import SCRATCH


@dataclass(frozen=True)
class Move:
    where: Layout
    pools: tuple[Tensor, ...]
    slot_BR: Tensor

    def after(self, verdict: Verdict) -> tuple[Tensor, ...]:
        pools = tuple(pool.clone() for pool in self.pools)
        move_path(pools, self.slot_BR, verdict)
        return pools

    def expected(self, verdict: Verdict) -> tuple[Tensor, ...]:
        """Slot by slot, from what was there before."""
        pools = tuple(pool.clone() for pool in self.pools)
        for b, count in enumerate(verdict.count_B.tolist()):
            length = int(self.where.length_B[b])
            for level, row in enumerate(verdict.path_BD[b, :count].tolist()):
                source, target = (self.where.slot(b, length + r) for r in (row, level))
                for pool, old in zip(pools, self.pools, strict=True):
                    pool[:, target] = old[:, source]
        return pools


def move(where: Layout, seed: int, dtype: torch.dtype = torch.float32) -> Move:
    """Pools of random bits (NaN among them): a move must not look at what it moves."""
    rng = torch.Generator().manual_seed(seed)
    slots = (where.pages + 1) * where.page_size
    raw = [torch.randint(-(2**62), 2**62, (2, slots, 2, 4), generator=rng) for _ in range(2)]
    pools = tuple(x.view(dtype)[..., :4].contiguous() for x in raw)
    rows = where.draft.tokens_BR.shape[1]
    slot_BR = torch.full((len(where.length_B), rows), SCRATCH)
    for b, live in enumerate(where.draft.live_B.tolist()):
        start = int(where.length_B[b])
        slot_BR[b, :live] = torch.tensor(where.slots(b, start + live, start))
    return Move(where, pools, slot_BR)


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    page_size = draw(st.sampled_from([16, 32]))
    return layout(draw(st.integers(0, 10**6)), lengths, draw(st.integers(2, 33)), page_size)


@given(
    layouts(), st.integers(0, 99), st.sampled_from([torch.float64, torch.float32, torch.bfloat16])
)
@settings(max_examples=30, deadline=None)
def test_every_path_of_a_tree_is_moved_bit_for_bit(
    where: Layout, seed: int, dtype: torch.dtype
) -> None:
    case = move(where, seed, dtype)
    lives = where.draft.live_B.tolist()
    for step in range(max(lives)):
        verdict = verdict_to(where.draft, [(step + b) % live for b, live in enumerate(lives)])
        assert same(case.after(verdict), case.expected(verdict))


@given(layouts(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_verdict_cut_short_moves_no_more_than_it_counts(
    where: Layout, data: st.DataObject
) -> None:
    case = move(where, 0)
    goals = [data.draw(st.integers(0, live - 1)) for live in where.draft.live_B.tolist()]
    depths = [int(where.draft.depth_BR[b, goal]) for b, goal in enumerate(goals)]
    counts = [data.draw(st.integers(0, depth + 1)) for depth in depths]
    verdict = verdict_to(where.draft, goals, counts)
    assert same(case.after(verdict), case.expected(verdict))


def deep_case() -> tuple[Move, Verdict]:
    """A comb: the second child of each node goes on, so that every source is also a target."""
    where = layout(0, [13], 9, 16)
    ends = [9, 2, 9, 4, 9, 6, 9, 8, 9]
    draft = replace(
        where.draft,
        parent_BR=torch.tensor([[0, 0, 0, 2, 2, 4, 4, 6, 6]]),
        depth_BR=torch.tensor([[0, 1, 1, 2, 2, 3, 3, 4, 4]]),
        end_BR=torch.tensor([ends]),
        live_B=torch.tensor([9]),
    )
    return move(replace(where, draft=draft), 1), verdict_to(draft, [8])


def one_by_one(case: Move, verdict: Verdict, order: list[int]) -> tuple[Tensor, ...]:
    """As one device thread does it: in place, level by level."""
    pools = tuple(pool.clone() for pool in case.pools)
    for level in order:
        source = int(case.slot_BR[0, verdict.path_BD[0, level]])
        for pool in pools:
            pool[:, case.slot_BR[0, level]] = pool[:, source]
    return pools


def test_in_preorder_the_levels_may_be_copied_upwards_in_place() -> None:
    case, verdict = deep_case()
    assert verdict.path_BD.tolist() == [[0, 2, 4, 6, 8]]
    assert same(one_by_one(case, verdict, [1, 2, 3, 4]), case.after(verdict))


def test_the_check_of_order_can_fail() -> None:
    case, verdict = deep_case()
    assert not same(one_by_one(case, verdict, [4, 3, 2, 1]), case.after(verdict))


def test_a_root_alone_moves_nothing() -> None:
    case = move(layout(2, [7, 30], 8, 16), 2)
    assert same(case.after(verdict_to(case.where.draft, [0, 0])), case.pools)


def test_the_move_never_asks_the_device() -> None:
    case, verdict = deep_case()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor
        told = Verdict(*(fake(getattr(verdict, name)) for name in Verdict.__dataclass_fields__))
        move_path(tuple(fake(pool) for pool in case.pools), fake(case.slot_BR), told)
