"""On a GPU's kernels drafting calls next to nothing of torch's own, and nothing more a level.

A recorded round pays for every call about what a small kernel takes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from drafter_views import PAGE, view_of
from small_models import fill_randomly, tiny_decoder
from tiny_engine import VOCAB
from torch import Tensor
from torch_launches import Launches
from triton_device import DEVICE, MARKS

from furcate.config import DraftOptions
from furcate.drafters.around import around_head, around_model
from furcate.drafters.base import Tokens, View
from furcate.drafters.draft_cache import Room
from furcate.engine.target import chain as target_chain
from furcate.heads import eagle
from furcate.heads.eagle import Eagle1, Eagle3
from furcate.heads.mtp import Mtp
from furcate.heads.output import Shared
from furcate.heads.spec import EagleSpec, MtpSpec
from furcate.kernels import draft_head_triton
from furcate.kernels.backend import TORCH, Kernels
from furcate.kernels.backend_triton import TRITON
from furcate.kernels.draft import Draft, Proposal, Verdict
from furcate.models import blocks_triton
from furcate.models.blocks import TORCH as PLAIN
from furcate.models.decoder import Decoder
from furcate.models.weights import places

pytestmark = MARKS

KINDS = ("eagle3", "eagle3 with norms elsewhere", "mtp", "eagle1", "model of few words")
TEXTS = [list(range(4, 23)), [9, 5], list(range(30, 37))]
SHORTEST = [[9], [5, 8], [31]]
FEW = 30  # words, of which some texts have others
WIDTH = 2
ROWS = 1 + WIDTH
MOST = 0  # calls of a whole draft, of putting it in its place, and of learning


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":  # the interpreter sorts a thousand keys in half a second
        monkeypatch.setattr(draft_head_triton, "_BLOCKS", 16)


@dataclass(frozen=True)
class Drafted:
    """What rounds of a drafter come to, and what the last one called of torch's own."""

    proposals: list[Proposal]
    proposing: Counter[str]
    learning: Counter[str]


def drafted(
    kind: str, depth: int, rounds: int, kernels: Kernels = TRITON, texts: list[list[int]] = TEXTS
) -> Drafted:
    drafter = drafter_of(kind, depth, kernels)
    assert drafter.depth == depth
    view = on_device(view_of(texts, width=48, temperatures=[0.9, 0.0, 0.7]))
    width = len(drafter.layers) * drafter.network.state_size
    rng = torch.Generator().manual_seed(3)
    features = torch.randn(len(texts), 24, width, generator=rng).to(DEVICE)
    proposals, launches = [], []
    with torch.no_grad():  # composite calls come apart, as they do on a GPU
        drafter.keep(replace(view, length_B=view.length_B * 0), chain(24, texts), features)
        pool, gain = empty_pool(drafter.pool), torch.empty(len(texts), ROWS, device=DEVICE)
        seen = features[:, :ROWS].contiguous()
        for _ in range(rounds):
            with Launches() as proposing:
                proposals.append(drafter.propose(view, depth))
                kernels.put(pool, view.slot_B, proposals[-1], gain)
            root_B = view.tokens_BW.gather(1, view.length_B[:, None])[:, 0]
            draft, verdict = judged(drafter, proposals[-1], root_B)
            with Launches() as learning:
                drafter.learn(view, draft, verdict, seen)
            launches = [proposing.calls, learning.calls]
            view = replace(view, length_B=view.length_B + verdict.count_B)
    return Drafted(proposals, *launches)


def drafter_of(kind: str, depth: int, kernels: Kernels) -> Any:
    how = DraftOptions(depth=depth, topk=WIDTH, num_draft_tokens=ROWS, adaptive=False)
    room = Room(len(TEXTS), 32, PAGE, VOCAB, DEVICE, kernels)
    if kind == "model of few words":
        return around_model(decoder_of(FEW, kernels), how, room)
    return around_head(head_of(kind, decoder_of(VOCAB, kernels)), how, room)


def decoder_of(words: int, kernels: Kernels) -> Decoder:
    spec = replace(tiny_decoder(vocab=words).spec, head_dim=16)
    made = Decoder(spec, torch.float32, torch.device("cpu")).requires_grad_(False)
    fill_randomly(places(made), 0)
    return made.to(DEVICE).on(PLAIN if kernels is TORCH else blocks_triton.TRITON)


def head_of(kind: str, target: Decoder) -> Any:
    block = replace(target.spec, num_layers=1, rope_layers=(True,), intermediate_size=40)
    shared, size = Shared.of(target), block.hidden_size
    token_D = torch.arange(3, VOCAB, 2, device=DEVICE)
    made: Any
    if kind == "mtp":
        made = Mtp(MtpSpec(block, (2,), VOCAB), shared, None)
    elif kind == "eagle1":
        made = Eagle1(EagleSpec("eagle1", block, size, (2,), VOCAB, fc_bias=True), shared, None)
    else:
        elsewhere = kind != "eagle3"
        spec = EagleSpec(
            "eagle3",
            block,
            size,
            (0, 1, 2),
            len(token_D),
            fc_norm=not elsewhere,
            norm_before_fc=elsewhere,
            norm_before_residual=elsewhere,
            norm_output=elsewhere,
        )
        made = Eagle3(spec, shared, token_D)
    filled = {name: torch.empty(x.shape) for name, x in made.named_parameters()}
    fill_randomly(filled, 5)
    for name, x in made.requires_grad_(False).named_parameters():
        x.copy_(filled[name])
    return made


def judged(drafter: Any, proposal: Proposal, root_B: Tensor) -> tuple[Draft, Verdict]:
    """The best nodes of a proposal, of which none, one and two follow one another on a path."""
    allowance_B = torch.full_like(root_B, ROWS)
    draft = TORCH.select(proposal, root_B, ROWS, allowance_B)
    path_BD = torch.zeros(len(root_B), drafter.depth + 1, dtype=torch.int64, device=DEVICE)
    path_BD[1:, 1:] = 1
    path_BD[2, 2:] = 2
    count_B = torch.arange(1, len(root_B) + 1, device=DEVICE)
    return draft, Verdict(path_BD, path_BD, count_B, count_B - 1)


def empty_pool(nodes: int) -> Proposal:
    """A state's, of as many slots as there are requests."""
    tokens, parent, depth, tag = torch.zeros(4, len(TEXTS), nodes, device=DEVICE).long().unbind()
    return Proposal(tokens, parent, depth, torch.zeros(len(TEXTS), nodes, device=DEVICE), tag)


def chain(rows: int, texts: list[list[int]]) -> Draft:
    """A stretch of prompt as long as the target has scored, for all requests."""
    tokens_BR = torch.zeros(len(texts), rows, dtype=torch.int64, device=DEVICE)
    live_B = torch.tensor([len(text) for text in texts], device=DEVICE)
    return target_chain(tokens_BR, live_B)


def on_device(view: View) -> View:
    def moved(what: Any) -> Any:
        found = {f.name: getattr(what, f.name) for f in fields(what)}
        tensors = {name: x.to(DEVICE) for name, x in found.items() if isinstance(x, Tensor)}
        return replace(what, **tensors)

    law = replace(moved(view.law), choice_B=view.length_B.to(DEVICE) * 0)
    return replace(moved(view), tokens=Tokens(view.tokens_BW.to(DEVICE)), law=law)


@pytest.mark.parametrize("kind", KINDS)
def test_a_further_level_calls_nothing_of_torchs_own_and_trees_are_torchs(kind: str) -> None:
    told = drafted(kind, 2, 2, TORCH)
    shallow, deep = drafted(kind, 2, 2), drafted(kind, 4, 1)
    assert shallow.proposing == deep.proposing and shallow.learning == deep.learning
    assert sum(deep.proposing.values()) + sum(deep.learning.values()) <= MOST
    assert sum(told.proposing.values()) > 50 + MOST, "torch's own are counted"
    assert_same(shallow.proposals, told.proposals)


def test_a_head_of_more_norms_than_a_kernel_takes_drafts_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = drafted("eagle3", 2, 2, TORCH)
    monkeypatch.setattr(eagle, "MOST_PARTS", 2)
    assert_same(drafted("eagle3", 2, 2).proposals, told.proposals)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_one_token_has_the_trees_that_it_has_in_torch(kind: str) -> None:
    told, found = (drafted(kind, 3, 1, kernels, SHORTEST) for kernels in (TORCH, TRITON))
    assert_same(found.proposals, told.proposals)


def assert_same(ones: list[Proposal], others: list[Proposal]) -> None:
    for one, other in zip(ones, others, strict=True):
        for f in fields(Proposal):
            a, b = getattr(one, f.name), getattr(other, f.name)
            if f.name == "tag_BP":  # a weight in 65,535 steps
                assert bool(((a - b).abs() <= 8).all())
            else:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
