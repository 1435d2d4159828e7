"""Bulk writing through the Triton kernels says what the torch references say.

Without a GPU the kernels run in the interpreter, and the step is not captured.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from small_models import fill_randomly, tiny_decoder
from triton_device import DEVICE, MARKS

from furcate.engine import bulk_rows
from furcate.engine.bulk import Script, Stage, Written, write
from furcate.engine.bulk_cuda import Cuda
from furcate.errors import Unsupported
from furcate.kv.cache import CacheShape, PagedCache
from furcate.models.decoder import Decoder
from furcate.models.weights import places

pytestmark = MARKS

VOCAB = 40


def wide_decoder() -> Decoder:
    """A tiny decoder whose heads are as wide as the kernels want them."""
    spec = replace(tiny_decoder(vocab=VOCAB).spec, head_dim=16)
    decoder = Decoder(spec, torch.float32, torch.device("cpu"))
    fill_randomly(places(decoder), 0)
    return decoder.requires_grad_(False)


def random_script(seed: int) -> Script:
    rng = random.Random(seed)
    stages = tuple(
        Stage(tuple(rng.choices(range(VOCAB), k=3)), rng.choice([0.0, 1.0]), rng.randint(1, 9))
        for _ in range(2)
    )
    return Script(stages, rng.getrandbits(64))


def run(decoder: Decoder, scripts: list[Script]) -> list[Written]:
    return list(write(decoder, scripts, stop_ids=[2], batch=3, context=20))


class Interpreted(Cuda):
    """There is nothing to capture on a CPU."""

    def ready(self, step):  # type: ignore[no-untyped-def]
        return step


def test_the_kernels_write_what_the_references_write(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = wide_decoder()
    scripts = [random_script(seed) for seed in range(5)]
    expected = run(decoder, scripts)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(bulk_rows, "backend_for", Interpreted)
    assert run(decoder.to(DEVICE), scripts) == expected


def test_shapes_that_the_kernels_do_not_know_are_refused() -> None:
    shape = CacheShape(layers=1, kv_heads=2, head_dim=8, pages=1, page_size=64)
    cache = PagedCache(shape, torch.float32, torch.device("cpu"))
    with pytest.raises(Unsupported, match=r"head_dim: .*powers of two.*got 8"):
        Cuda(tiny_decoder(torch.float32), cache, 1)
    double = wide_decoder().to(torch.float64)
    with pytest.raises(Unsupported, match=r"dtype: .*got 'float64'"):
        Cuda(double, cache, 1)
