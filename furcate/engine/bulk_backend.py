"""How rows of one token each attend and choose: the seam between bulk writing and the device.

Legend: B rows, P pages of a row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from furcate.kernels.tree_attention import Places, behind
from furcate.kv.cache import PagedCache
from furcate.models.decoder import Attend, Decoder
from furcate.verify.law import Law, Needs, plain_rows
from furcate.verify.process import choose, process

__all__ = ["Backend", "Sampling", "backend_for", "row_places"]

Sampling = tuple[Tensor, Tensor, Tensor]
"""temperature_B float32, seed_B int64, position_B int64 of the tokens that are chosen."""


class Backend(Protocol):
    """What a device does in its own way."""

    def attend(self, at_B: Tensor) -> Attend:
        """Write the keys of one token a row, at position `at_B`, and look at all up to it."""
        ...

    def choose(self, logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """The engine's choice at these positions, int64 [B], and where there is none, bool [B]."""
        ...

    def ready(self, step: Callable[[], None]) -> Callable[[], None]:
        """The same step in the form that is fastest to repeat; may run it, on idle rows."""
        ...


def backend_for(decoder: Decoder, cache: PagedCache, batch: int) -> Backend:
    """The backend of the decoder's device. Raises Unsupported for what its kernels cannot do."""
    if decoder.device.type == "cpu":
        return _Reference(decoder, cache, batch)
    # its kernels need triton, which machines without a GPU need not have
    cuda: Backend = import_module("furcate.engine.bulk_cuda").Cuda(decoder, cache, batch)
    return cuda


def row_places(cache: PagedCache, batch: int, at_B: Tensor) -> Places:
    """Row b owns the b-th run of pages behind the scratch page."""
    shape = cache.shape
    pages = shape.pages // batch
    table_BP = torch.arange(1, shape.pages + 1, device=at_B.device).view(batch, pages)
    return Places(table_BP, at_B, shape.page_size, pages * shape.page_size)


class _Reference:
    """The torch references, for the CPU."""

    def __init__(self, decoder: Decoder, cache: PagedCache, batch: int) -> None:
        self._heads = decoder.spec.num_heads
        self._cache = cache
        self._batch = batch

    def attend(self, at_B: Tensor) -> Attend:
        one_B = torch.ones_like(at_B)
        places = row_places(self._cache, self._batch, at_B)
        # columns behind the longest row are nobody's yet; here they would be gathered all the same
        places = replace(places, columns=int(at_B.max()) + 1)
        return self._cache.attend(behind(places, one_B[:, None], one_B), self._heads)

    def choose(self, logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        temperature_B, seed_B, position_B = sampling
        zero_B = torch.zeros_like(seed_B)
        law = Law(
            needs=Needs(noise=True),
            temperature_B=temperature_B,
            seed_B=seed_B,
            choice_B=zero_B,
            output_B=zero_B,
            stop_BS=zero_B[:, None],
        )
        rows = plain_rows(zero_B, position_B - 1)
        choice = choose(process(logits_BV[:, None], law, rows))
        return choice.token_BR[:, 0], choice.broken_BR[:, 0]

    def ready(self, step: Callable[[], None]) -> Callable[[], None]:
        return step
