"""What an engine holds of a device's memory, in bytes, and how many pages there is room for.

Nothing here asks a device: what is free comes in as a number. Legend: T rows of all requests in a
round, C hidden size, V vocabulary, F features for a drafter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from furcate.config import EngineOptions
from furcate.drafters.footprint import Footprint
from furcate.engine.graphs import MOST_RECORDINGS
from furcate.engine.state import MAX_STOP_IDS, StateShape
from furcate.errors import BadRequest, Unsupported
from furcate.kv.cache import CacheShape
from furcate.models.product_cut import most_part_bytes
from furcate.models.spec import DecoderSpec

__all__ = ["Demand", "Device", "Memory", "Running", "Sizes", "demand_of", "named", "pages_for"]

DEFAULT_SHARE = 0.9  # of a GPU's memory
_GIB = 2**30
# What the matrix library keeps for every stream that multiplies (cuBLAS on compute capability 9)
_LIBRARY = 32 * 2**20
# Recordings share one pool as large as the largest round; the plays before each recording run on
# a stream of their own, which keeps as much for itself. Captures that fail are not counted on:
# each of the few that may keeps its pool.
_COPIES = 2
_RECORDING = 2**20  # what the driver keeps for the launches of one recording
# Bytes that a score takes beside the network's own once a law is more than noise: a copy in
# float32 where a kernel knows such laws; else copies, masks, keys and random words
_LAWFUL = {"triton": 4, "torch": 64}
_LOGPROB = 12  # bytes of a score at an emitted token: in float32, its logarithm, one on the way
_OPTION = 14  # bytes a token of the vocabulary takes in the options of a request, once asked for


@dataclass(frozen=True, slots=True)
class Device:
    """Bytes that are free once all weights are loaded, and bytes that there are."""

    free: int
    total: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The largest rounds and passes of an engine."""

    state: StateShape
    rows: int  # of each request in a round, root included
    chunk: int  # rows of a stretch of prompt
    features: int  # F, width of what a pass hands to the drafter


@dataclass(frozen=True, slots=True)
class Running:
    """How rounds run."""

    kernels: str
    recorded: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """What an engine holds at most.

    `kv` and `draft_kv` are pools, scratch included; `state` is what else is kept of requests,
    `workspace` what a round or a stretch of prompt needs for a while, `graphs` what recordings of
    rounds add to it.
    """

    weights: int
    draft_weights: int  # those that are not the target's
    kv: int
    draft_kv: int
    state: int
    workspace: int
    graphs: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())

    def as_json(self) -> dict[str, int]:
        """For `--json`."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True, slots=True)
class Demand:
    """What an engine needs without a single page, and what a page takes."""

    least: Memory
    page_size: int
    page: int
    draft_page: int

    def with_pages(self, pages: int) -> Memory:
        """The whole of it."""
        least = self.least
        return replace(
            least,
            kv=least.kv + pages * self.page,
            draft_kv=least.draft_kv + pages * self.draft_page,
        )

    def room(self, device: Device, share: float, engines: int = 1) -> int:
        """Tokens there is room for where `engines` on the same weights may hold this share.

        Weights are loaded already; what others hold is not free. Negative where nothing fits.
        """
        weights = self.least.weights + self.least.draft_weights
        part = (int(share * device.total) - weights) // engines
        allowed = min(part, int(share * device.free))
        left = allowed - (self.least.total - weights)
        return left // (self.page + self.draft_page) * self.page_size


def demand_of(
    spec: DecoderSpec,
    weights: Mapping[int, int],
    cache: tuple[CacheShape, torch.dtype],
    drafter: Footprint,
    sizes: Sizes,
    running: Running,
) -> Demand:
    """What an engine asks of a device.

    Args:
        spec: of the target.
        weights: bytes of each of the target's storages, by address.
        cache: shape (its pages do not count) and dtype of the target's pool.
        drafter: what it holds beside.
        sizes: of the largest rounds.
        running: how rounds run.
    """
    shape, dtype = cache
    own = sum(size for at, size in drafter.weights.items() if at not in weights)
    page = shape.bytes(dtype) // (shape.pages + 1)
    draft_page = drafter.slot * shape.page_size
    # what a product takes while it is at work, in rounds and in short stretches of a prompt alike
    product = _LIBRARY + (most_part_bytes() if running.kernels == "triton" else 0)
    round_ = _round(spec, dtype, sizes, running) + drafter.work
    passes = sizes.chunk * _pass_row(spec, dtype, sizes.features)
    at_once = MOST_RECORDINGS + 1  # one gives way when the next is made
    recorded = _COPIES * (round_ + product) + at_once * _RECORDING
    least = Memory(
        weights=sum(weights.values()),
        draft_weights=own,
        kv=page,
        draft_kv=draft_page + drafter.scratch,
        state=_state(sizes.state),
        workspace=max(round_, passes) + product,
        graphs=recorded if running.recorded else 0,
    )
    return Demand(least, shape.page_size, page, draft_page)


def pages_for(options: EngineOptions, demand: Demand, device: Device, context: int) -> int:
    """Pages of the pool on a GPU: as many as asked for, or as there is use and room for.

    Args:
        options: `kv_tokens`, `gpu_memory_utilization`, `engines`, `max_batch`, `page_size` count.
        context: most tokens of a request.

    Raises:
        BadRequest: the pool that was asked for does not fit, or one request does not.
    """
    share = options.gpu_memory_utilization or DEFAULT_SHARE
    room = demand.room(device, share, options.engines)
    wanted = options.kv_tokens
    if wanted is not None and wanted > room:
        raise BadRequest(
            f"there is room for {max(0, room)} tokens {_beside(demand, device, share)}",
            field="kv_tokens",
            value=wanted,
            hint=_LOWER,
        )
    if room < context:
        raise BadRequest(
            f"one request may need {context} tokens, and there is room for {max(0, room)} "
            + _beside(demand, device, share),
            field="max_context",
            value=context,
            hint=_LOWER,
        )
    tokens = min(room, options.max_batch * context) if wanted is None else wanted
    return -(-tokens // options.page_size)


_LOWER = (
    "lower it, max_batch, num_draft_tokens or prefill_chunk, raise gpu_memory_utilization, or free "
    "memory on the device"
)

_LACKS = ("cublas_status_alloc_failed", "cuda error: out of memory")


@contextmanager
def named(doing: str) -> Iterator[None]:
    """A device that runs out of memory meanwhile is a user's error, and says what to lower.

    So is one whose programs have too little of their own for a kernel.
    """
    try:
        yield
    except RuntimeError as fault:
        if not _out_of_memory(fault):
            raise
        raise BadRequest(
            f"the device ran out of memory while {doing}",
            field="gpu_memory_utilization",
            hint="lower it, kv_tokens, max_batch, max_context or prefill_chunk, take a smaller "
            "dtype, or free memory on the device",
        ) from fault
    except Exception as fault:
        if not _too_large(fault):
            raise
        raise Unsupported(
            f"a kernel is too large for this GPU while {doing}: {fault}",
            field="device",
            hint="take a smaller dtype, a GPU with more shared memory a program, or the cpu",
        ) from fault


def _too_large(fault: Exception) -> bool:
    """Triton, which is no part of every installation, is there if this is its word for it."""
    errors = sys.modules.get("triton.runtime.errors")
    return errors is not None and isinstance(fault, errors.OutOfResources)


def _out_of_memory(fault: RuntimeError) -> bool:
    """Torch has a class for its own allocator; what the driver and cuBLAS lack is told in words."""
    told = str(fault).casefold()
    return isinstance(fault, torch.OutOfMemoryError) or any(words in told for words in _LACKS)


def _beside(demand: Demand, device: Device, share: float) -> str:
    need = demand.least
    return (
        f"beside {_gib(need.weights + need.draft_weights)} of weights and "
        f"{_gib(need.state + need.workspace + need.graphs)} to work in, where {_gib(device.free)} "
        f"of {_gib(device.total)} are free and gpu_memory_utilization is {share:g}"
    )


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def _round(spec: DecoderSpec, dtype: torch.dtype, sizes: Sizes, running: Running) -> int:
    """A pass over all rows, the logits, what the law makes of them, and logprobs of the path."""
    batch = sizes.state.capacity
    rows = batch * sizes.rows
    score = dtype.itemsize + _LAWFUL[running.kernels]
    told = batch * sizes.state.levels * _LOGPROB
    columns = batch * (sizes.state.context + sizes.rows) * 8  # the tokens that a round looks at
    per_score = spec.vocab_size * (rows * score + told + batch * _OPTION)  # options of who plays
    return rows * _pass_row(spec, dtype, sizes.features) + per_score + columns


def _pass_row(spec: DecoderSpec, dtype: torch.dtype, features: int) -> int:
    """Bytes of a row where a layer is widest: the stream, its norm, and a product with its input.

    Features are kept aside until they are put together.
    """
    heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    inner = max(3 * spec.intermediate_size, heads)
    return dtype.itemsize * (3 * spec.hidden_size + inner + 2 * features)


def _state(shape: StateShape) -> int:
    """Tokens, tables and proposals of all requests, and options over the vocabulary."""
    numbers = shape.context + shape.levels + shape.pages + MAX_STOP_IDS + 5 * shape.pool
    return (shape.capacity + 1) * (8 * numbers + _OPTION * shape.vocab)
