"""The target as the round sees it: score a draft in one pass over the paged cache.

Legend: B requests, R rows, V vocabulary, T = B * R flat rows, F features for the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.drafters.base import View
from furcate.kernels.draft import Draft
from furcate.kernels.tree_attention import Places, Sight, behind
from furcate.kv.cache import PagedCache
from furcate.models.decoder import Decoder, States

__all__ = ["Scored", "Span", "Target", "chain"]


@dataclass(frozen=True, slots=True)
class Scored:
    """The target's logits at every row, and what else the pass left behind."""

    logits_BRV: Tensor
    slot_BR: Tensor  # where the rows' keys and values were written
    features_BRF: Tensor  # states that the drafter needs; F is 0 if it needs none


@dataclass(frozen=True, slots=True)
class Span:
    """How far a pass looks: columns of the longest request, and its place if it lies in one run."""

    columns: int
    run: int | None = None


class Target:
    """A decoder and its paged cache; `layers` are the states it hands on to a drafter."""

    def __init__(self, decoder: Decoder, cache: PagedCache, layers: tuple[int, ...] = ()) -> None:
        self.decoder = decoder
        self.cache = cache
        self.layers = layers

    def score(self, view: View, draft: Draft, span: Span) -> Scored:
        """One pass over all rows; row r of request b stands at position length[b] + depth."""
        states, sight = self._pass(view, draft, span)
        logits_TV = self.decoder.logits(states.last_TC)
        shape = draft.tokens_BR.shape
        return Scored(
            logits_TV.view(*shape, -1),
            sight.write_T.view(shape),
            states.features_TF.view(*shape, states.features_TF.shape[1]),
        )

    def prefill(self, view: View, draft: Draft, span: Span) -> Tensor:
        """Write the keys and values of a chain of prompt tokens; its features, [B, R, F]."""
        features_TF = self._pass(view, draft, span)[0].features_TF
        return features_TF.view(*draft.tokens_BR.shape, features_TF.shape[1])

    def _pass(self, view: View, draft: Draft, span: Span) -> tuple[States, Sight]:
        places = Places(
            view.table_BS, view.length_B, self.cache.shape.page_size, span.columns, span.run
        )
        sight = behind(places, draft.end_BR, draft.live_B)
        position_BR = view.length_B[:, None] + draft.depth_BR
        attend = self.cache.attend(sight, self.decoder.spec.num_heads)
        states = self.decoder.states(
            draft.tokens_BR.flatten(), position_BR.flatten(), attend, self.layers
        )
        return states, sight


def chain(tokens_BR: Tensor, live_B: Tensor) -> Draft:
    """Rows that follow one another: a stretch of prompt, or a draft without branches."""
    batch, rows = tokens_BR.shape
    r_R = torch.arange(rows, device=tokens_BR.device)
    live_BR = r_R < live_B[:, None]
    return Draft(
        tokens_BR=tokens_BR,
        parent_BR=torch.where(live_BR, (r_R - 1).clamp_min(0), 0),
        depth_BR=torch.where(live_BR, r_R, 0),
        end_BR=torch.where(live_BR, live_B[:, None], r_R + 1),
        value_BR=torch.zeros(batch, rows, device=tokens_BR.device),
        live_B=live_B,
        tag_BR=None,
    )
