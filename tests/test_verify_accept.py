"""The accepted path of a tree, by the reference and by ancestor words."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from verify_cases import draft_of, random_draft, stacked

from furcate.kernels import accept as accept_module
from furcate.kernels.accept import accept, accept_words, ancestor_words
from furcate.kernels.draft import Draft, Verdict


def walked(draft: Draft, choice_BR: Tensor, request: int) -> list[int]:
    """The slow walk: from the root to the first child whose token is the choice."""
    path = [0]
    live = int(draft.live_B[request])
    while True:
        here = path[-1]
        follow = [
            j
            for j in range(1, live)
            if draft.parent_BR[request, j] == here
            and draft.tokens_BR[request, j] == choice_BR[request, here]
        ]
        if not follow:
            return path
        path.append(follow[0])


def wrong_verdicts(verdict: Verdict, draft: Draft, choice_BR: Tensor, depth: int) -> int:
    """Requests whose verdict is not the slow walk's. (Siblings must differ in their tokens.)"""
    wrong = 0
    for b in range(len(choice_BR)):
        path = walked(draft, choice_BR, b)
        padded = path + [path[-1]] * (depth + 1 - len(path))
        right = (
            verdict.path_BD[b].tolist() == padded
            and verdict.emitted_BD[b].tolist() == choice_BR[b, padded].tolist()
            and verdict.accepted_B[b] == len(path) - 1
            and verdict.count_B[b] == len(path)
        )
        wrong += not right
    return wrong


def cases(seed: int, rows: int, batch: int = 64, depth: int = 6) -> tuple[Draft, Tensor]:
    """Random trees of few tokens with unique siblings, and choices that often follow them."""
    rng = random.Random(seed)
    drafts: list[Draft] = []
    while len(drafts) < batch:
        draft = random_draft(rng, rows, rng.randint(1, rows), depth, vocab=rows)
        born = list(zip(draft.parent_BR[0].tolist(), draft.tokens_BR[0].tolist(), strict=True))
        born = born[1 : int(draft.live_B)]
        if len(set(born)) == len(born):
            drafts.append(draft)
    draft = stacked(drafts)
    choice_BR = torch.randint(rows, (batch, rows), generator=torch.Generator().manual_seed(seed))
    for b in range(batch):
        for j in range(1, rows):  # pads too: their token equals the root's choice
            if rng.random() < 0.7:
                choice_BR[b, draft.parent_BR[b, j]] = draft.tokens_BR[b, j]
    return draft, choice_BR


@pytest.mark.parametrize("rows", [1, 2, 8, 31, 32, 33, 65])
def test_the_verdict_is_the_slow_walks(rows: int) -> None:
    draft, choice_BR = cases(rows, rows)
    assert wrong_verdicts(accept(draft, choice_BR, 6), draft, choice_BR, 6) == 0


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 65])
def test_words_and_reference_agree(rows: int) -> None:
    draft, choice_BR = cases(rows + 100, rows)
    words_BRW = ancestor_words(draft.end_BR)
    assert words_BRW.shape[-1] == -(-rows // 32)
    assert int(words_BRW.max()) < 2**32
    by_words, by_rows = accept_words(words_BRW, draft, choice_BR, 6), accept(draft, choice_BR, 6)
    for name in Verdict.__slots__:
        assert torch.equal(getattr(by_words, name), getattr(by_rows, name))


def test_words_name_the_ancestors() -> None:
    draft = draft_of([0] * 5, [0, 0, 1, 0, 3], pads=[0])
    bits = ancestor_words(draft.end_BR)[0, :, 0].tolist()
    assert bits == [0b1, 0b11, 0b111, 0b1001, 0b11001, 0b100000]


def test_a_pad_told_by_its_token_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_token(draft: Draft, choice_BR: Tensor) -> Tensor:
        slot_R = torch.arange(choice_BR.shape[1])
        wanted_BR = choice_BR.gather(1, draft.parent_BR)
        return (slot_R == 0) | (draft.tokens_BR == wanted_BR)

    draft = draft_of([1, 2], [0, 0], pads=[3, 3])
    # pads have depth 0 and lose by that alone; with another depth only the index tells them
    draft = replace(draft, depth_BR=torch.tensor([[0, 1, 1, 1]]))
    choice_BR = torch.tensor([[3, 3, 3, 3]])
    assert accept(draft, choice_BR, 2).accepted_B.tolist() == [0]
    monkeypatch.setattr(accept_module, "_matches", by_token)
    assert accept(draft, choice_BR, 2).accepted_B.tolist() == [1]


def test_a_root_that_is_not_forced_to_match_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def unforced(draft: Draft, choice_BR: Tensor) -> Tensor:
        slot_R = torch.arange(choice_BR.shape[1])
        wanted_BR = choice_BR.gather(1, draft.parent_BR)
        return (draft.tokens_BR == wanted_BR) & (slot_R < draft.live_B[:, None])

    draft, choice_BR = cases(8, 8)
    monkeypatch.setattr(accept_module, "_matches", unforced)
    verdict = accept(draft, choice_BR, 6)
    assert wrong_verdicts(verdict, draft, choice_BR, 6) > len(choice_BR) // 4


def test_duplicate_siblings_go_to_the_lowest_row() -> None:
    draft = draft_of([0, 5, 5, 7], [0, 0, 0, 2])
    verdict = accept(draft, torch.tensor([[5, 9, 9, 9]]), 2)
    assert verdict.path_BD.tolist() == [[0, 1, 1]]
    # a deeper path beats a lower row, and both are the target's own tokens
    deeper = accept(draft, torch.tensor([[5, 7, 7, 9]]), 2)
    assert deeper.path_BD.tolist() == [[0, 2, 3]]
    assert deeper.emitted_BD.tolist() == [[5, 7, 9]]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_whatever_is_drafted_each_emitted_token_is_a_choice_on_the_path(
    seed: int, rows: int
) -> None:
    rng = random.Random(seed)
    draft = random_draft(rng, rows, rng.randint(1, rows), 5, vocab=3)  # siblings may repeat
    choice_BR = torch.tensor([[rng.randrange(3) for _ in range(rows)]])
    verdict = accept(draft, choice_BR, 5)
    path = verdict.path_BD[0, : int(verdict.count_B)].tolist()
    assert path[0] == 0
    assert max(path) < int(draft.live_B)
    for up, node in itertools.pairwise(path):
        assert draft.parent_BR[0, node] == up
        assert draft.tokens_BR[0, node] == choice_BR[0, up]
    assert len(path) == len(longest_walk(draft, choice_BR))


def longest_walk(draft: Draft, choice_BR: Tensor) -> list[int]:
    """The longest followed path, all siblings tried."""
    best = [0]
    open_paths = [[0]]
    while open_paths:
        path = open_paths.pop()
        best = max(best, path, key=len)
        open_paths += [
            [*path, j]
            for j in range(1, int(draft.live_B))
            if draft.parent_BR[0, j] == path[-1] and draft.tokens_BR[0, j] == choice_BR[0, path[-1]]
        ]
    return best
