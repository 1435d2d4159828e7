"""Replays a recorded answer: what a drafter would have proposed at every root of it.

The emitted stream does not depend on the drafter, so the target is asked once for its features,
and then every position of the answer is a root of its own, all of them in one batch over the same
pages. Legend: B roots, W tokens of the stream, S pages, D levels, T roots of the whole answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from furcate.drafters.base import Tokens, View
from furcate.engine.build import Built
from furcate.engine.target import Span, chain
from furcate.errors import BadRequest
from furcate.verify.law import Law, Needs

__all__ = ["Replay", "Stream"]


@dataclass(frozen=True, slots=True)
class Stream:
    """One prompt and what the target answered under a temperature and a seed."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float = 0.0
    seed: int = 0
    category: str = ""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt + self.answer


class Replay:
    """A drafter and its target over one recorded stream after another.

    Args:
        built: parts of an engine; its `max_batch` is the number of roots of one pass, and its
            cache must hold a whole stream.
    """

    def __init__(self, built: Built) -> None:
        self.drafter = built.round.drafter
        self.target = built.round.target
        self.batch = built.options.max_batch
        self.chunk = built.options.prefill_chunk
        self.device = built.round.state.device

    @torch.inference_mode()
    def views(
        self, stream: Stream, first: int = 0, every: int = 1
    ) -> Iterator[tuple[View, Tensor]]:
        """(roots, the tokens that follow each [B, D], -1 past the end), batch by batch.

        Of the answer's roots the `first`, counted from 0, and each `every` one behind it. What is
        asked of the drafter at these views must be asked in inference mode.
        """
        self._read(stream)
        levels = self.drafter.depth
        tokens_W = torch.tensor((*stream.tokens, *(-1,) * levels), device=self.device)
        level_D = torch.arange(1, levels + 1, device=self.device)
        for root_B in self._roots(stream, first, every):
            yield self._view(stream, root_B), tokens_W[root_B[:, None] + level_D]

    def _roots(self, stream: Stream, first: int, every: int) -> Iterator[Tensor]:
        """Positions whose next token is one of the answer, in batches."""
        start = len(stream.prompt) - 1
        end = start + len(stream.answer)
        if start + first < end:
            roots_T = torch.arange(start + first, end, every, device=self.device)
            yield from torch.split(roots_T, self.batch)

    def _read(self, stream: Stream) -> None:
        """Let target and drafter read the whole stream, stretch by stretch."""
        width = len(stream.tokens)
        room = self.target.cache.shape.pages * self.target.cache.shape.page_size
        if width + 1 > room:
            raise BadRequest("a stream is longer than the cache", field="kv_tokens", value=room)
        for start in range(0, width, self.chunk):
            end = min(start + self.chunk, width)
            view = self._view(stream, torch.tensor([start], device=self.device))
            live_B = torch.tensor([end - start], device=self.device)
            rows = chain(view.tokens_BW[:, start:end], live_B)
            self.drafter.keep(view, rows, self.target.prefill(view, rows, Span(end)))
            self.drafter.read(view, rows)

    def _view(self, stream: Stream, root_B: Tensor) -> View:
        """Requests that stand at these roots of the stream, and share its pages."""
        batch, width = len(root_B), len(stream.tokens) + 1
        page_size = self.target.cache.shape.page_size
        tokens_W = torch.tensor((*stream.tokens, 0), device=self.device)
        page_S = torch.arange(1, -(-width // page_size) + 1, device=self.device)
        return View(
            slot_B=torch.arange(batch, device=self.device),
            tokens=Tokens(tokens_W.expand(batch, -1)),
            length_B=root_B,
            table_BS=page_S.expand(batch, -1),
            law=_law(stream, root_B),
        )


def _law(stream: Stream, root_B: Tensor) -> Law:
    """Temperature and seed alone; every root is told that it is choice 0."""
    zero_B = torch.zeros_like(root_B)
    seed = stream.seed - (1 << 64) if stream.seed >= 1 << 63 else stream.seed
    return Law(
        needs=Needs(noise=stream.temperature > 0),
        temperature_B=torch.full(root_B.shape, stream.temperature, device=root_B.device),
        seed_B=zero_B + seed,
        choice_B=zero_B,
        output_B=root_B - (len(stream.prompt) - 1),
        stop_BS=zero_B[:, None] - 1,
    )
