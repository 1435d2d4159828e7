"""Moving the accepted path in Triton: bit for bit as the reference, nothing else touched."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from kv_cases import Layout, layout, verdict_to
from test_kernels_kv_move import Move, deep_case, move, same
from torch import Tensor
from triton_device import DEVICE, MARKS

from furcate.kernels import kv_move_triton
from furcate.kernels.draft import Verdict
from furcate.kernels.kv_move_triton import move_path

pytestmark = MARKS


def after(case: Move, verdict: Verdict) -> tuple[Tensor, Tensor]:
    return after_each(case, [verdict])[0]


def after_each(case: Move, verdicts: Sequence[Verdict]) -> list[tuple[Tensor, Tensor]]:
    """What each of these moves leaves of the same pools.

    All of it goes to the device at once and comes back at once: a copy takes far longer than a
    move. Each move gets tensors of its own, which lie as evenly as an engine's do.
    """
    keys, values = (pool.to(DEVICE) for pool in case.pools)
    slot_BR = case.slot_BR.to(DEVICE)
    names = [f.name for f in fields(Verdict)]
    there = [torch.stack([getattr(v, name) for v in verdicts]).to(DEVICE) for name in names]
    moved: list[tuple[Tensor, Tensor]] = []
    for n in range(len(verdicts)):
        pools = keys.clone(), values.clone()
        move_path(pools, slot_BR, Verdict(*(x[n].clone() for x in there)))
        moved.append(pools)
    all_keys, all_values = (torch.stack(each).cpu() for each in zip(*moved, strict=True))
    return list(zip(all_keys, all_values, strict=True))


def wide(case: Move, layers: int, heads: int, size: int) -> Move:
    """The same requests with larger slots; random bits, NaN among them."""
    rng = torch.Generator().manual_seed(layers)
    shape = (layers, case.pools[0].shape[1], heads, size)
    pools = (torch.randint(-(2**15), 2**15, shape, generator=rng, dtype=torch.int16) for _ in "kv")
    return replace(case, pools=tuple(x.view(torch.bfloat16) for x in pools))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_path_of_random_trees_is_moved_bit_for_bit(dtype: torch.dtype) -> None:
    trees = 6 if DEVICE.type == "cpu" else 60
    for seed in range(trees):
        lengths = random.Random(seed).sample(range(41), 1 + seed % 3)
        where = layout(seed, lengths, 5 + seed * 5, 16)
        case = move(where, seed, dtype)
        lives = where.draft.live_B.tolist()
        steps = range(max(lives))
        goals = [[(step + b) % live for b, live in enumerate(lives)] for step in steps]
        verdicts = [verdict_to(where.draft, each) for each in goals]
        for verdict, left in zip(verdicts, after_each(case, verdicts), strict=True):
            assert same(left, case.expected(verdict))


@pytest.mark.parametrize(("layers", "heads", "size"), [(1, 1, 16), (3, 3, 64), (5, 8, 128)])
@pytest.mark.parametrize("programs", [1, 2048])
def test_slots_of_any_size_and_any_cut(
    monkeypatch: pytest.MonkeyPatch, programs: int, layers: int, heads: int, size: int
) -> None:
    monkeypatch.setattr(kv_move_triton, "_PROGRAMS", programs)
    where = layout(3, [17, 40], 24, 16, full=True)
    case = wide(move(where, 3), layers, heads, size)
    for goals in ([23, 11], [0, 20], [7, 0]):
        verdict = verdict_to(where.draft, goals)
        assert same(after(case, verdict), case.expected(verdict))


def test_a_comb_whose_sources_are_all_targets() -> None:
    case, verdict = deep_case()
    assert same(after(case, verdict), case.expected(verdict))
    assert not same(after(case, verdict), case.pools), "something had to move"


def test_a_verdict_cut_short_moves_no_more_than_it_counts() -> None:
    case, verdict = deep_case()
    for count in range(6):
        cut = replace(verdict, count_B=torch.tensor([count]))
        assert same(after(case, cut), case.expected(cut))


def test_the_likeliest_path_touches_no_memory() -> None:
    """Slots that do not exist are never looked at where the path is 0, 1, 2, ..."""
    where: Layout = layout(1, [5], 6, 16, full=True)
    case = move(where, 1)
    nowhere = replace(case, slot_BR=torch.full_like(case.slot_BR, 2**40))
    path_BD = torch.tensor([[0, 1, 2, 2]])
    first = Verdict(path_BD, path_BD, torch.tensor([3]), torch.tensor([2]))
    assert same(after(nowhere, first), case.pools)
