"""Bulk writing on a GPU: Triton attention and sampling, and the whole step as one CUDA graph.

Legend: B rows, P pages of a row, V vocabulary, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from furcate.engine.bulk_backend import Sampling, row_places
from furcate.errors import Unsupported
from furcate.kernels.draws import Draws
from furcate.kernels.sample_triton import sample
from furcate.kernels.tree_attention import Keys, Sight
from furcate.kernels.tree_attention_triton import tree_attention
from furcate.kv.cache import PagedCache
from furcate.models.decoder import Attend, Decoder

__all__ = ["Cuda"]

_WARM_UP = 3  # runs before the capture, in which kernels are compiled and workspaces made


class Cuda:
    """See `Backend`."""

    def __init__(self, decoder: Decoder, cache: PagedCache, batch: int) -> None:
        _check(decoder)
        self._cache = cache
        self._places = row_places(cache, batch, torch.zeros(batch, device=decoder.device).long())
        self._one_B = torch.ones_like(self._places.length_B)
        self._zero_B = torch.zeros_like(self._places.length_B)

    def attend(self, at_B: Tensor) -> Attend:
        places = replace(self._places, length_B=at_B)
        # a row's pages follow one another
        write_B = places.table_BP[:, 0] * places.page_size + at_B
        sight = Sight(places, write_B[:, None], self._one_B[:, None], self._one_B)

        def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            keys = Keys(self._cache.k_LSKD[layer], self._cache.v_LSKD[layer])
            keys.k_SKD.index_copy_(0, write_B, k_TKD)
            keys.v_SKD.index_copy_(0, write_B, v_TKD)
            return tree_attention(q_THD, keys, sight)

        return attend

    def choose(self, logits_BV: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        temperature_B, seed_B, position_B = sampling
        broken_B = torch.empty_like(seed_B, dtype=torch.bool)
        token_B = sample(
            logits_BV, Draws(temperature_B, seed_B, self._zero_B, position_B), broken_B
        )
        return token_B, broken_B

    def ready(self, step: Callable[[], None]) -> Callable[[], None]:
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # kernels find what belongs to a stream when it records
            for _ in range(_WARM_UP):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=aside):
            step()
        replay: Callable[[], None] = graph.replay
        return replay


def _check(decoder: Decoder) -> None:
    size = decoder.spec.head_dim
    if size < 16 or size & (size - 1):
        what = "the attention kernel is for head sizes that are powers of two, at least 16"
        raise Unsupported(what, field="head_dim", value=size, hint="use the CPU")
    if decoder.dtype == torch.float64:
        what = "the attention kernel is for float32 and half precision"
        raise Unsupported(what, field="dtype", value="float64", hint="use float32, or the CPU")
