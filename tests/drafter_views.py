"""What the drafters' tests share: views, laws, a tiny decoder, and what makes a proposal legal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from furcate.drafters.base import Drafter, Tokens, View
from furcate.kernels.draft import Draft, Proposal
from furcate.models.decoder import Decoder
from furcate.models.spec import DecoderSpec, RopeSpec
from furcate.verify.law import Law, Needs

PAGE = 16
CPU = torch.device("cpu")
TINY = DecoderSpec(
    vocab_size=23,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    max_position=256,
    rope=RopeSpec(theta=100.0),
    rope_layers=(True, True),
)


def tiny_decoder(seed: int = 0) -> Decoder:
    """A decoder in float64 whose next-token laws are neither flat nor certain."""
    decoder = Decoder(TINY, torch.float64, CPU)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng, dtype=torch.float64) * 0.7)
    return decoder.requires_grad_(False)


def proposed(drafter: Drafter, view: View) -> Proposal:
    """All the levels that it has."""
    return drafter.propose(view, drafter.depths[-1])


def law_of(temperatures: Sequence[float]) -> Law:
    batch = len(temperatures)
    zero_B = torch.zeros(batch, dtype=torch.int64)
    return Law(
        needs=Needs(noise=any(t > 0 for t in temperatures)),
        temperature_B=torch.tensor(temperatures, dtype=torch.float32),
        seed_B=torch.arange(batch) + 7,
        choice_B=zero_B,
        output_B=zero_B + 1,
        stop_BS=zero_B[:, None] - 1,
    )


def view_of(
    texts: Sequence[Sequence[int]],
    *,
    width: int | None = None,
    temperatures: Sequence[float] | None = None,
    garbage: int = 3,
    slots: Sequence[int] | None = None,
) -> View:
    """Requests whose committed tokens are `texts` (the last one is the root), page tables shuffled.

    Columns past the root hold `garbage`, which must not matter.
    """
    batch, longest = len(texts), max(map(len, texts))
    width = longest if width is None else width
    rows = [list(text) + [garbage] * (width - len(text)) for text in texts]
    pages = -(-(width + 64) // PAGE)
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1)) + 1
    return View(
        slot_B=torch.tensor(range(batch) if slots is None else slots),
        tokens=Tokens(torch.tensor(rows)),
        length_B=torch.tensor([len(text) - 1 for text in texts]),
        table_BS=order.view(batch, pages),
        law=law_of([0.0] * batch if temperatures is None else temperatures),
    )


def paths_of(proposal: Proposal, b: int = 0) -> dict[tuple[int, ...], float]:
    """Value of every live node of request b by the tokens of its path; checks that it is legal."""
    tokens, parent = proposal.tokens_BP[b].tolist(), proposal.parent_BP[b].tolist()
    depth, value = proposal.depth_BP[b].tolist(), proposal.value_BP[b].tolist()
    path: dict[int, tuple[int, ...]] = {-1: ()}
    found: dict[tuple[int, ...], float] = {}
    for node in range(len(tokens)):
        if value[node] == -torch.inf:
            continue
        up = parent[node]
        assert up < node, "parents come before their children"
        assert up == -1 or value[node] < value[up] < 0, "a child is less likely than its parent"
        path[node] = (*path[up], tokens[node])
        assert depth[node] == len(path[node])
        assert path[node] not in found, "siblings differ in their token"
        found[path[node]] = value[node]
    return found


def no_features(draft: Draft) -> Tensor:
    """What a drafter without layers is told of a round."""
    return torch.zeros(*draft.tokens_BR.shape, 0, dtype=torch.float64)


def rows_equal(a: Proposal, b: Proposal, row: int, other: int) -> bool:
    pairs: list[tuple[Tensor | None, Tensor | None]] = [
        (a.tokens_BP, b.tokens_BP),
        (a.parent_BP, b.parent_BP),
        (a.depth_BP, b.depth_BP),
        (a.value_BP, b.value_BP),
        (a.tag_BP, b.tag_BP),
    ]
    return all(x is None or y is None or torch.equal(x[row], y[other]) for x, y in pairs)
