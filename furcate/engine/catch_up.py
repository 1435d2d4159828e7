"""Shows a drafter with keys of its own what was committed while it was not asked."""

from __future__ import annotations

from dataclasses import replace

import torch

from furcate.engine.request import Request
from furcate.engine.round import Round
from furcate.engine.scheduler import most_cached
from furcate.engine.target import chain
from furcate.verify.law import needs_of

__all__ = ["CatchUp"]


class CatchUp:
    """Whoever proposes must have seen all that is committed, and so must who shares its pages."""

    def __init__(self, round_: Round, vocab: int) -> None:
        self._round = round_
        self._vocab = vocab

    @torch.inference_mode()
    def read(self, request: Request, unread: int = 0) -> None:
        """Read on to the last token whose keys are cached; a light drafter keeps nothing.

        `unread` is the most tokens that rounds in flight may add: theirs are read too.
        """
        state, drafter, end = self._round.state, self._round.drafter, most_cached(request, unread)
        if drafter.light or request.read >= end:
            return
        slot_B = torch.tensor([request.slot], device=state.device)
        view = state.view(slot_B, end, needs_of([request.ask.params], self._vocab))
        start_B = torch.tensor([request.read], device=state.device)
        live_B = view.length_B.clamp_max(end) - start_B
        rows = chain(view.tokens_BW[:, request.read :], live_B)
        drafter.read(replace(view, length_B=start_B), rows)
        request.read = request.cached
