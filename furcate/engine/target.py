"""The target as the round sees it: score a draft in one pass over the paged cache.

Legend: B requests, R rows, V vocabulary, T = B * R flat rows, F features for the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.drafters.base import View
from furcate.kernels.arrival import Words
from furcate.kernels.draft import Draft
from furcate.kernels.tree_attention import Places, Sight, behind
from furcate.kv.cache import Attending, PagedCache
from furcate.models.decoder import Decoder, States
from furcate.models.rope import Turn

__all__ = ["Scored", "Span", "Target", "chain"]


@dataclass(frozen=True, slots=True)
class Scored:
    """The target's logits at every row, and what else the pass left behind."""

    logits_BRV: Tensor
    slot_BR: Tensor  # where the rows' keys and values were written
    features_BRF: Tensor  # states that the drafter needs; F is 0 if it needs none
    next_BR: Tensor | None = None  # int64, position of each row's choice; None: nobody has made it


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
        passed = self._pass(view, draft, span)
        states = passed.states
        logits_TV = self.decoder.logits(states.last_TC)
        shape = draft.tokens_BR.shape
        return Scored(
            logits_TV.view(*shape, -1),
            passed.sight.write_T.view(shape),
            states.features_TF.view(*shape, states.features_TF.shape[1]),
            passed.next_BR,
        )

    def prefill(self, view: View, draft: Draft, span: Span) -> Tensor:
        """Write the keys and values of a chain of prompt tokens; its features, [B, R, F]."""
        features_TF = self._pass(view, draft, span).states.features_TF
        return features_TF.view(*draft.tokens_BR.shape, features_TF.shape[1])

    def _pass(self, view: View, draft: Draft, span: Span) -> _Passed:
        places = Places(
            view.table_BS, view.length_B, self.cache.shape.page_size, span.columns, span.run
        )
        arrive = self.cache.kernels.arrive
        if arrive is None:
            return self._pass_spelled_out(places, draft)
        rope = self.decoder.rope
        words = Words(self.decoder.embedding, rope.freq_F, rope.spec.attention_factor)
        found = arrive(places, draft, words)
        sight = Sight(places, found.slot_BR, draft.end_BR, draft.live_B)
        by = Turn(found.cos_T1D, found.sin_T1D)
        states = self.decoder.through(found.x_TC, by, self._attend(sight), self.layers)
        return _Passed(states, sight, found.next_BR)

    def _pass_spelled_out(self, places: Places, draft: Draft) -> _Passed:
        sight = behind(places, draft.end_BR, draft.live_B)
        position_BR = places.length_B[:, None] + draft.depth_BR
        states = self.decoder.states(
            draft.tokens_BR.flatten(), position_BR.flatten(), self._attend(sight), self.layers
        )
        return _Passed(states, sight)

    def _attend(self, sight: Sight) -> Attending:
        return self.cache.attend(sight, self.decoder.spec.num_heads)


@dataclass(frozen=True, slots=True)
class _Passed:
    states: States
    sight: Sight
    next_BR: Tensor | None = None  # where it was made on the way


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
