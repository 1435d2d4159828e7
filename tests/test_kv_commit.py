"""Keys and values after a commit are those of a plain run, for every path that may be accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import CPU, Layout, bits, dense_keys, layout, verdict_to, view_at
from small_models import tiny_decoder
from torch import Tensor
from verify_cases import path_of

from furcate.engine.target import Span, Target
from furcate.kernels.draft import Draft, Verdict
from furcate.kernels.select import lone_roots
from furcate.kernels.tree_attention import Keys
from furcate.kv.cache import CacheShape, PagedCache
from furcate.models.causal import causal_attend

VOCAB = 50
DECODER = tiny_decoder(torch.float64, vocab=VOCAB)
TOLERANCE = 1e-10
NAN = float("nan")


@dataclass
class Scene:
    """Requests with their prompts cached and their trees scored, nothing accepted yet."""

    where: Layout
    prompts: list[list[int]]
    target: Target
    slot_BR: Tensor
    logits_BRV: Tensor
    scored: Keys

    def accept(self, verdict: Verdict) -> None:
        """From what was scored, whatever was accepted before."""
        cache = self.target.cache
        cache.k_LSKD.copy_(self.scored.k_SKD)
        cache.v_LSKD.copy_(self.scored.v_SKD)
        cache.move(self.slot_BR, verdict)

    def text(self, b: int, goal: int) -> list[int]:
        """Prompt, root and the path to a row."""
        rows = [0, *path_of(self.where.draft, goal, b)]
        return self.prompts[b] + self.where.draft.tokens_BR[b, rows].tolist()

    def gap(self, b: int, text: Sequence[int]) -> float:
        """Largest distance of request b's keys and values from a plain run over `text`."""
        plain, slots = dense_keys(DECODER, text), self.where.slots(b, len(text))
        cache = self.target.cache
        gaps = (cache.k_LSKD[:, slots] - plain.k_SKD, cache.v_LSKD[:, slots] - plain.v_SKD)
        return max(float(gap.abs().nan_to_num(nan=torch.inf).max()) for gap in gaps)


def scene(where: Layout) -> Scene:
    """Every page that is nobody's is NaN."""
    spec = DECODER.spec
    shape = CacheShape(
        spec.num_layers, spec.num_kv_heads, spec.head_dim, where.pages, where.page_size
    )
    cache = PagedCache(shape, torch.float64, CPU)
    cache.k_LSKD[:, where.page_size :] = NAN
    cache.v_LSKD[:, where.page_size :] = NAN
    rng = torch.Generator().manual_seed(len(where.length_B))
    prompts = [torch.randint(VOCAB, (n,), generator=rng).tolist() for n in where.length_B.tolist()]
    for b, prompt in enumerate(prompts):
        if prompt:
            keys, slots = dense_keys(DECODER, prompt), where.slots(b, len(prompt))
            cache.k_LSKD[:, slots], cache.v_LSKD[:, slots] = keys.k_SKD, keys.v_SKD
    target = Target(DECODER, cache)
    scored = target.score(view_at(where), where.draft, Span(where.columns))
    kept = Keys(cache.k_LSKD.clone(), cache.v_LSKD.clone())
    return Scene(where, prompts, target, scored.slot_BR, scored.logits_BRV, kept)


def check_every_path(where: Layout) -> None:
    made = scene(where)
    lives = where.draft.live_B.tolist()
    for step in range(max(lives)):
        goals = [(step + b) % live for b, live in enumerate(lives)]
        verdict = verdict_to(where.draft, goals)
        made.accept(verdict)
        for b, goal in enumerate(goals):
            assert made.gap(b, made.text(b, goal)) <= TOLERANCE
            check_the_move_is_bitwise(made, b, verdict)


def check_the_move_is_bitwise(made: Scene, b: int, verdict: Verdict) -> None:
    count, cache = int(verdict.count_B[b]), made.target.cache
    source = made.slot_BR[b, verdict.path_BD[b, :count]]
    goal = made.slot_BR[b, :count]
    assert torch.equal(bits(cache.k_LSKD[:, goal]), bits(made.scored.k_SKD[:, source]))
    assert torch.equal(bits(cache.v_LSKD[:, goal]), bits(made.scored.v_SKD[:, source]))


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("past", [-11, -7, -3, -1])
def test_where_the_tree_straddles_two_pages(page_size: int, past: int) -> None:
    lengths = [page_size + past, 2 * page_size + past]
    check_every_path(layout(past, lengths, 12, page_size, vocab=VOCAB, full=True))


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_random_trees_in_ragged_batches(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=3))
    seed, rows = data.draw(st.integers(0, 10**6)), data.draw(st.integers(2, 14))
    page_size = data.draw(st.sampled_from([16, 32]))
    check_every_path(layout(seed, lengths, rows, page_size, vocab=VOCAB))


def two_branches() -> Layout:
    """0 - 1 - 2 and 0 - 3 - 4 after 14 tokens: the second branch lies on the next page."""
    where = layout(0, [14], 5, 16, vocab=VOCAB)
    draft = Draft(
        tokens_BR=torch.tensor([[5, 6, 7, 8, 9]]),
        parent_BR=torch.tensor([[0, 0, 1, 0, 3]]),
        depth_BR=torch.tensor([[0, 1, 2, 1, 2]]),
        end_BR=torch.tensor([[5, 3, 3, 5, 5]]),
        value_BR=torch.zeros(1, 5),
        live_B=torch.tensor([5]),
    )
    return replace(where, draft=draft)


def test_the_comparison_can_fail() -> None:
    made = scene(two_branches())
    text = made.text(0, 4)
    made.accept(verdict_to(made.where.draft, [4]))
    assert made.gap(0, text) <= TOLERANCE
    made.accept(verdict_to(made.where.draft, [2]))
    assert made.gap(0, text) > 1e-2, "the other branch was accepted"
    made.accept(verdict_to(made.where.draft, [4], counts=[2]))
    assert made.gap(0, text) > 1e-2, "the last level was not moved"


@given(st.data())
@settings(max_examples=12, deadline=None)
def test_the_round_after_a_commit_sees_what_plain_decoding_sees(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    where = layout(data.draw(st.integers(0, 10**6)), lengths, 12, 16, vocab=VOCAB)
    made = scene(where)
    goals = [data.draw(st.integers(0, live - 1)) for live in where.draft.live_B.tolist()]
    verdict = verdict_to(where.draft, goals)
    made.accept(verdict)
    bonus_B = torch.full((len(goals),), 3)
    after = replace(view_at(where), length_B=where.length_B + verdict.count_B)
    columns = int(after.length_B.max()) + 1
    logits_BRV = made.target.score(after, lone_roots(bonus_B), Span(columns)).logits_BRV
    for b, goal in enumerate(goals):
        plain_V = last_logits([*made.text(b, goal), 3])
        assert (logits_BRV[b, 0] - plain_V).abs().max() <= TOLERANCE


@given(st.integers(0, 10**6), st.integers(0, 40))
@settings(max_examples=12, deadline=None)
def test_every_row_of_a_tree_has_the_logits_of_its_own_text(seed: int, length: int) -> None:
    made = scene(layout(seed, [length], 12, 16, vocab=VOCAB))
    for row in range(int(made.where.draft.live_B)):
        plain_V = last_logits(made.text(0, row))
        assert (made.logits_BRV[0, row] - plain_V).abs().max() <= TOLERANCE


def last_logits(text: Sequence[int]) -> Tensor:
    """Logits after a text, by one dense causal pass."""
    hidden_TC = DECODER(torch.tensor(text), torch.arange(len(text)), causal_attend)
    return DECODER.logits(hidden_TC[-1:])[0]
