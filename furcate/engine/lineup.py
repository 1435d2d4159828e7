"""From those who play to a Batch: slots, sizes, and what is to be told of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from furcate.engine.request import Request
from furcate.engine.round import Batch
from furcate.engine.scheduler import most_cached
from furcate.verify.law import Needs

__all__ = ["Lineup"]


class Lineup:
    """Batches of one engine."""

    def __init__(self, vocab: int, page_size: int) -> None:
        self._vocab = vocab
        self._page_size = page_size

    def of(self, players: list[Request], rows: int, needs: Needs, unread: int = 0) -> Batch:
        """A round of these, behind others that may add `unread` tokens to each."""
        longest = max(most_cached(request, unread) + 1 for request in players)
        top = self._top(players)
        return Batch(
            slot_B=torch.tensor([request.slot for request in players]),
            allowance_B=torch.tensor([rows] * len(players)),
            rows=rows,
            columns=longest + rows,
            run=self.run(players),
            needs=needs,
            raw_top=top.get("raw"),
            processed_top=top.get("processed"),
        )

    def run(self, players: Sequence[Request]) -> int | None:
        """First slot of a lone request whose pages follow one another; None: keys are gathered."""
        pages = players[0].pages.numbers
        if len(players) > 1 or pages != list(range(pages[0], pages[0] + len(pages))):
            return None
        return pages[0] * self._page_size

    def _top(self, players: Sequence[Request]) -> dict[str, int]:
        """How many of the likeliest tokens are told, by mode; nothing of what nobody asks for."""
        asked = [r.ask.params for r in players if r.ask.params.logprobs]
        top: dict[str, int] = {p.logprobs_mode: 0 for p in asked}
        for p in asked:
            most = min(p.top_logprobs, self._vocab)
            top[p.logprobs_mode] = max(top[p.logprobs_mode], most)
        return top
