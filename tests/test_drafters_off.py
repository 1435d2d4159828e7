"""Drafters by name, the one that never drafts, and the tests' own adversary."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from drafter_views import CPU, TINY, paths_of, tiny_decoder, view_of

from furcate.config import DraftOptions
from furcate.drafters.adversary import SHAPES, Adversary
from furcate.drafters.make import Setting, make_drafter
from furcate.drafters.ngram import NgramDrafter
from furcate.drafters.off import OffDrafter
from furcate.errors import BadRequest
from furcate.kernels.select import gains, select
from furcate.kv.cache import CacheShape
from furcate.text.tokenizer import load_tokenizer

STREAM = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


@pytest.fixture(scope="module")
def setting(embedded_model: Path) -> Setting:
    shape = CacheShape(layers=2, kv_heads=2, head_dim=4, pages=4, page_size=16)
    return Setting(tiny_decoder(), load_tokenizer(embedded_model), shape, 2, DraftOptions())


def test_off_proposes_nothing_and_select_copes() -> None:
    drafter, view = OffDrafter(), view_of([[1, 2, 1], [4]])
    proposal = drafter.propose(view, 0)
    assert drafter.depth == 0 and drafter.depths == ()
    assert gains(proposal, 3).sum() == 0
    draft = select(proposal, torch.tensor([1, 4]), 4, torch.tensor([4, 4]))
    assert draft.live_B.tolist() == [1, 1]


def test_drafters_are_made_by_name(setting: Setting) -> None:
    assert isinstance(make_drafter("off", setting), OffDrafter)
    assert isinstance(make_drafter("ngram", setting), NgramDrafter)


def test_no_draft_tokens_means_off(setting: Setting) -> None:
    none = dataclasses.replace(setting, options=DraftOptions(num_draft_tokens=0))
    assert isinstance(make_drafter("ngram", none), OffDrafter)


def test_an_unknown_name_is_refused(setting: Setting) -> None:
    with pytest.raises(BadRequest):
        make_drafter("no-such-drafter", setting)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_adversarys_trees_are_legal(shape: str) -> None:
    texts = [STREAM[:3], STREAM[:9], [7, 7]]
    drafter = Adversary([STREAM], shape, vocab=TINY.vocab_size, seed=5)
    for _ in range(20):
        proposal = drafter.propose(view_of(texts), drafter.depth)
        for b in range(3):
            paths_of(proposal, b)


def test_the_hidden_path_is_there_and_never_the_likeliest() -> None:
    drafter = Adversary([STREAM], "hidden", vocab=TINY.vocab_size)
    proposal = drafter.propose(view_of([STREAM[:3]]), drafter.depth)
    right = tuple(STREAM[3:7])
    assert right in paths_of(proposal)
    draft = select(proposal, torch.tensor([STREAM[2]]), 25, torch.tensor([25]))
    assert draft.tokens_BR[0, 1] != STREAM[3]
    assert draft.tokens_BR.device == CPU


def test_the_wrong_tree_never_helps() -> None:
    drafter = Adversary([STREAM], "wrong", vocab=TINY.vocab_size)
    for _ in range(20):
        paths = paths_of(drafter.propose(view_of([STREAM[:3]]), drafter.depth))
        assert (STREAM[3],) not in paths
