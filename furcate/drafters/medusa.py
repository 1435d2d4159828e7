"""Drafts with Medusa heads: all levels come from one state of the target, none knows the others.

Legend: B requests, R rows of one pass, D levels, K heads, C hidden size, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from furcate.drafters.base import View
from furcate.drafters.draft_cache import Room, places_of
from furcate.drafters.expand import Manner
from furcate.drafters.footprint import SPELLED_OUT, Footprint, storages
from furcate.drafters.vocabulary import Vocabulary
from furcate.heads.medusa import Medusa
from furcate.kernels.draft import Draft, Proposal, Verdict
from furcate.kv.states import StatePool

__all__ = ["MedusaDrafter"]


class MedusaDrafter:
    """Medusa (arXiv:2401.10774, section 2.1), its tree grown by coupled scores or fixed by ranks.

    Head d says what it thinks of level d, whatever stands above: a path is worth the product over
    its levels.

    Args:
        heads: on `room.device`.
        manner: the shape of its trees, no deeper than there are heads.
        room: sizes of the engine.
    """

    light = False

    def __init__(self, heads: Medusa, manner: Manner, room: Room) -> None:
        self.heads = heads
        self.layers = heads.layers
        self.plan = manner.plan
        self.depth = len(manner.plan)
        # one product gives all heads, so fewer of them are no cheaper
        self.depths: tuple[int, ...] = (self.depth,)
        self.pool = sum(step.candidates for step in manner.plan)
        spec = heads.spec
        self.words = Vocabulary(heads.token_D, min(room.vocab, spec.vocab_size))
        dtype = next(heads.parameters()).dtype
        self._kernels = room.kernels.fitting(dtype)
        self._grower = manner.grower(self.words, room.device, self._kernels)
        self.plausible = self._grower.plausible
        self._room = room
        self.states = StatePool(room.slots, spec.hidden_size, dtype, room.device)

    @property
    def footprint(self) -> Footprint:
        """States, weights, and the scores of all levels."""
        scored = self._room.capacity * self.heads.depth * self.words.size
        return Footprint(
            slot=self.states.slot_bytes,
            work=scored * (self.states.state_SC.itemsize + SPELLED_OUT),
            weights=storages(self.heads),
        )

    def keep(self, view: View, rows: Draft, features_BRF: Tensor) -> None:
        """Keep the target's states at a stretch of committed tokens."""
        self._keep(view, rows.live_B, features_BRF)

    def read(self, view: View, rows: Draft) -> None:
        """There are no keys to catch up with."""

    def propose(self, view: View, levels: int) -> Proposal:
        """Every head's guess from the state before the root, level by level."""
        logits_KBV = self.heads.logits(self._heard(view))
        growth = self._grower.begin(view, levels)
        for logits_BV in logits_KBV[:levels]:
            growth.branch(logits_BV[:, None])
        return growth.proposal()

    def follow(self, view: View, next_BD: Tensor) -> Iterator[Tensor]:
        """What `scores` reads at each level, [B, C]: the same on every path."""
        yield from self._heard(view)[: self.depth]

    def scores(self, out_BC: Tensor, level: int) -> Tensor:
        """Scores of the draft vocabulary, [B, V], `level` tokens below the root."""
        outputs = self.heads.outputs
        scores_BV: Tensor = outputs[level % len(outputs)](out_BC)
        return scores_BV[:, : self.words.size]

    def learn(self, view: View, draft: Draft, verdict: Verdict, features_BRF: Tensor) -> None:
        """Note how often nodes of each weight were accepted; keep the accepted path's states."""
        self.plausible.learn(view, draft, verdict, self._room.capacity)
        path_BDF = verdict.path_BD[..., None].expand(-1, -1, features_BRF.shape[2])
        self._keep(view, verdict.count_B, features_BRF.gather(1, path_BDF))

    def forget(self, slot: int) -> None:
        """States lie in pages, and pages are the engine's."""

    def copy_page(self, source: int, target: int) -> None:
        """Follow the target's cache when it copies a shared page."""
        self.states.copy_page(source, target, self._room.page_size)

    def _keep(self, view: View, count_B: Tensor, features_BXF: Tensor) -> None:
        """The first `count` of each request, of positions from `view.length` on."""
        places = places_of(view, self._room)
        self._kernels.keep(self.states.state_SC, places, count_B, features_BXF.flatten(0, 1))

    def _heard(self, view: View) -> Tensor:
        """What each head makes of the state before the root, [K, B, C]."""
        before_B1 = view.length_B[:, None] - 1
        state_B1C = self.states.read(places_of(view, self._room), before_B1)
        heard_KBC: Tensor = self.heads(state_B1C[:, 0])
        return heard_KBC
