"""What the GPU scripts share: times of recorded graphs, and the ceilings of a device, taken now."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Timing", "buffers_for", "ceilings", "median_ms", "side_by_side", "timed"]

ROUNDS = 15  # replays; the median counts
FIRST = 5  # calls in the recording that only tells how many the next one should have
WANTED_MS = 2.0  # of one replay: the gap between replays and the clock's steps do not count then
MOST = 256  # calls in one recording
COLD = 3  # times the L2 cache that buffers must hold together to come from memory


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: the median of replays, and half of them lie within `spread`."""

    ms: float
    spread: float


def timed(call: Callable[[], Any], device: torch.device, *, turns: int = 1) -> Timing:
    """Of recorded calls on a GPU, of the wall clock on a CPU.

    A `call` that takes another buffer each time says in `turns` how many there are: a recording
    holds all of them equally often.
    """
    (found,) = side_by_side([call], device, turns=turns)
    return found


def median_ms(call: Callable[[], Any], device: torch.device) -> float:
    """The median alone."""
    return timed(call, device).ms


def side_by_side(
    calls: Sequence[Callable[[], Any]], device: torch.device, *, turns: int = 1
) -> list[Timing]:
    """Several calls timed in turn, so that a device that slows down slows all of them."""
    if device.type != "cuda":
        times = [[_wall(call) for call in calls] for _ in range(3)]
        return [_timing([row[i] for row in times], 1) for i in range(len(calls))]
    recorded = [_recorded(call, turns) for call in calls]
    times = [[_replayed(graph) for graph, _ in recorded] for _ in range(ROUNDS)]
    return [_timing([row[i] for row in times], count) for i, (_, count) in enumerate(recorded)]


def buffers_for(size: int, device: torch.device) -> int:
    """How many buffers of so many bytes are read in turn so that each comes from memory."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MOST, -(-COLD * cache // max(1, size))))


def ceilings(device: torch.device, *, tiny: bool) -> dict[str, float]:
    """Of this device, now.

    Bytes read by a large sum, read and written by a large copy, and whichever of the two is more;
    a large product in bf16; and the smallest kernel there is, one behind the other in a graph.
    """
    count, side = (1 << 20, 256) if tiny else (1 << 30, 8192)
    source = torch.randn(count // 4, device=device)
    target = torch.empty_like(source)
    copy_ms = median_ms(lambda: target.copy_(source), device)
    sum_ms = median_ms(lambda: source.view(-1, 1 << 12).sum(1), device)
    copy, read = 2 * source.nbytes / copy_ms / 1e6, source.nbytes / sum_ms / 1e6
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in "ab")
    product_ms = median_ms(lambda: a @ b, device)
    one = torch.zeros(1, device=device)
    return {
        "copy_gb_per_s": copy,
        "read_gb_per_s": read,
        "memory_gb_per_s": max(copy, read),
        "bf16_tflop_per_s": 2 * side**3 / product_ms / 1e9,
        "smallest_kernel_us": median_ms(lambda: one.add_(1), device) * 1e3,
    }


def _recorded(call: Callable[[], Any], turns: int) -> tuple[torch.cuda.CUDAGraph, int]:
    """(a recording of about WANTED_MS, its calls)."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):  # kernels are compiled, workspaces made, which may belong to a stream
            call()
    torch.cuda.synchronize()
    first = _record(call, FIRST, aside)
    first.replay()
    ms = _replayed(first) / FIRST
    # buffers that are read in turn are all read, or the few that are would stay in the cache
    count = max(turns, min(MOST, int(WANTED_MS / ms) + 1))
    count = -(-count // turns) * turns
    graph = _record(call, count, aside)
    graph.replay()
    return graph, count


def _record(call: Callable[[], Any], count: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            call()
    return graph


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in "be")
    began.record()
    graph.replay()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def _timing(times: Sequence[float], count: int) -> Timing:
    ordered = sorted(one / count for one in times)
    quarter = len(ordered) // 4
    return Timing(statistics.median(ordered), ordered[-1 - quarter] - ordered[quarter])


def _wall(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3
