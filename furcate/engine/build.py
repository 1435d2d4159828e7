"""From options to a ready engine: what was asked and what was decided are two things."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from furcate.config import DraftOptions, EngineOptions
from furcate.drafters.base import Drafter
from furcate.drafters.footprint import storages
from furcate.drafters.make import Recipe, Setting, recipe_of
from furcate.engine.asking import Limits
from furcate.engine.graphs import CudaRecorder, Graphs
from furcate.engine.memory import (
    Demand,
    Device,
    Memory,
    Running,
    Sizes,
    demand_of,
    named,
    pages_for,
)
from furcate.engine.player import Eager, Player
from furcate.engine.round import Round
from furcate.engine.scheduler import Scheduler
from furcate.engine.state import State, StateShape
from furcate.engine.target import Target
from furcate.errors import BadFile, BadRequest, Unsupported
from furcate.kernels.backend import kernels_of
from furcate.kv.book import PageBook
from furcate.kv.cache import CacheShape, PagedCache
from furcate.models.blocks import blocks_of
from furcate.models.decoder import Decoder
from furcate.models.load import load_decoder
from furcate.models.zoo import resolve
from furcate.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Built", "build", "device_of", "dtype_of", "load"]

DEFAULT_KV_TOKENS = 32768  # on the CPU untouched pages cost nothing
DEFAULT_NODES = 63
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
LEAST_CAPABILITY = (8, 0)  # of a GPU: what Triton and bfloat16 need


@dataclass(frozen=True, slots=True)
class Built:
    """The parts of an engine."""

    tokenizer: Tokenizer
    options: EngineOptions
    limits: Limits
    round: Round
    player: Player
    scheduler: Scheduler
    adaptive: bool
    memory: Memory | None = None  # what it holds of a GPU; None on a CPU


def load(
    target: str | Path, drafter: str | Path, options: EngineOptions, draft: DraftOptions
) -> Built:
    """Load a target and build an engine around it; see `Engine.load`."""
    device = device_of(options.device)
    dtype = dtype_of(options.dtype, device)
    path = resolve(target)
    tokenizer = load_tokenizer(path)
    with named("the target was loaded"):
        decoder = load_decoder(path, dtype, device)
    if decoder.can_pack:
        decoder.pack()
    return build(decoder, tokenizer, drafter, options, draft, home=path)


def build(
    decoder: Decoder,
    tokenizer: Tokenizer,
    drafter: str | Path | Drafter,
    options: EngineOptions,
    draft: DraftOptions,
    *,
    home: Path | None = None,
) -> Built:
    """An engine's parts around a decoder; `drafter` is a name, a path, or a Drafter itself.

    `home` is where the target came from. Raises BadRequest where the device has no room.
    """
    with named("the engine was built"):
        return _build(decoder, tokenizer, drafter, options, draft, home)


def _build(
    decoder: Decoder,
    tokenizer: Tokenizer,
    drafter: str | Path | Drafter,
    options: EngineOptions,
    draft: DraftOptions,
    home: Path | None,
) -> Built:
    _check_vocabulary(decoder, tokenizer)
    context = _context(options, decoder.spec.max_position)
    page = CacheShape(
        layers=decoder.spec.num_layers,
        kv_heads=decoder.spec.num_kv_heads,
        head_dim=decoder.spec.head_dim,
        pages=1,
        page_size=options.page_size,
    )
    kernels = kernels_of(decoder.device, batch_invariant=options.batch_invariant)
    if options.batch_invariant:
        decoder = decoder.on(blocks_of(decoder.device, decoder.dtype, batch_invariant=True))
    setting = Setting(decoder, tokenizer, page, options.max_batch, draft, kernels, home)
    recipe = recipe_of(drafter, setting) if isinstance(drafter, str | Path) else _ready(drafter)
    sizing = partial(_sizes, setting, options, context)
    pages, memory = _default_pages(options, context), None
    device = device_memory(decoder.device)
    if device is None and options.gpu_memory_utilization is not None:
        share = options.gpu_memory_utilization
        hint = "leave it out; kv_tokens sizes the cache"
        raise Unsupported("needs a GPU", field="gpu_memory_utilization", value=share, hint=hint)
    if device is not None:
        demand = _demand(setting, options, recipe(1), sizing)
        pages = pages_for(options, demand, device, context)
        memory = demand.with_pages(pages)
    guess = recipe(pages)
    most_nodes = _most_nodes(draft, guess)
    cache = PagedCache(replace(page, pages=pages), decoder.dtype, decoder.device, kernels)
    state = State(sizing(guess).state, decoder.device, cache.kernels)
    book = PageBook(
        pages,
        options.page_size,
        _copier(cache, guess),
        in_runs=decoder.device.type == "cpu",  # whose attention reads a run in place
    )
    round_ = Round(state, Target(decoder, cache, guess.layers), guess, most_nodes)
    return Built(
        tokenizer=tokenizer,
        options=options,
        limits=Limits(decoder.spec.vocab_size, context, tokenizer.eos_ids),
        round=round_,
        player=_player(round_, options),
        scheduler=Scheduler(book, options.max_batch, options.prefill_chunk),
        adaptive=draft.adaptive,
        memory=memory,
    )


def device_memory(device: torch.device) -> Device | None:
    """What is free on a GPU now; None on a CPU, where an untouched page takes nothing."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # what loading held is free
    return Device(*torch.cuda.mem_get_info(device))


def _ready(drafter: Drafter) -> Recipe:
    """One that was made before: its pools are as they are."""
    return lambda pages: drafter


def _sizes(setting: Setting, options: EngineOptions, context: int, drafter: Drafter) -> Sizes:
    spec, most_nodes = setting.target.spec, _most_nodes(setting.options, drafter)
    return Sizes(
        state=StateShape(
            capacity=options.max_batch,
            context=context,
            levels=drafter.depth + 1,
            pages=-(-(context + most_nodes + 1) // options.page_size),
            pool=drafter.pool,
            vocab=spec.vocab_size,
        ),
        rows=most_nodes + 1,
        chunk=options.prefill_chunk,
        features=len(drafter.layers) * spec.hidden_size,
    )


def _demand(
    setting: Setting, options: EngineOptions, drafter: Drafter, sizing: Callable[[Drafter], Sizes]
) -> Demand:
    target, page = setting.target, setting.cache
    fitting = setting.kernels.fitting(target.dtype, page.head_dim)
    return demand_of(
        target.spec,
        storages(target),
        (page, target.dtype),
        drafter.footprint,
        sizing(drafter),
        Running(fitting.name, recorded=options.graphs),
    )


def _player(round_: Round, options: EngineOptions) -> Player:
    """Recordings where the device has them; its own kernels never wait for the host."""
    if round_.state.device.type == "cuda" and options.graphs:
        return Graphs(round_, CudaRecorder())
    return Eager(round_)


def _check_vocabulary(decoder: Decoder, tokenizer: Tokenizer) -> None:
    """Every id of the tokenizer needs a row of the vocabulary matrix; rows to spare are padding."""
    rows = decoder.spec.vocab_size
    hint = "take the tokenizer and the weights from one checkpoint"
    if tokenizer.vocab_size > rows:
        what = f"the tokenizer has more tokens than the model's {rows}"
        raise BadFile(what, field="tokenizer.vocab_size", value=tokenizer.vocab_size, hint=hint)
    for token in tokenizer.eos_ids:
        if not 0 <= token < rows:
            what = f"the model has only {rows} tokens"
            raise BadFile(what, field="eos_token_id", value=token, hint=hint)


def _copier(cache: PagedCache, drafter: Drafter) -> Callable[[int, int], None]:
    def copy_page(source: int, target: int) -> None:
        cache.copy_page(source, target)
        drafter.copy_page(source, target)

    return copy_page


def _most_nodes(draft: DraftOptions, drafter: Drafter) -> int:
    if drafter.depth == 0:
        return 0
    wanted = DEFAULT_NODES if draft.num_draft_tokens is None else draft.num_draft_tokens
    return min(wanted, drafter.pool)


def device_of(name: str) -> torch.device:
    """The device an option names; "auto" is CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadRequest("no such device", field="device", value=name, hint="cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise Unsupported("furcate runs on cpu and cuda", field="device", value=name)
    if device.type == "cuda":
        _check_gpu(name, device)
    return device


def _check_gpu(name: str, device: torch.device) -> None:
    """What is missing is said before anything is loaded; nothing runs slowly for want of it."""
    if not torch.cuda.is_available():
        raise BadRequest("no CUDA device is there", field="device", value=name, hint="use cpu")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        there = "there is one CUDA device" if count == 1 else f"there are {count} CUDA devices"
        raise BadRequest(f"{there}, counted from 0", field="device", value=name)
    has = torch.cuda.get_device_capability(device)
    if has < LEAST_CAPABILITY:
        raise Unsupported(
            f"furcate's kernels and bfloat16 need compute capability {_dotted(LEAST_CAPABILITY)}, "
            f"and this device has {_dotted(has)}",
            field="device",
            value=name,
            hint="use cpu",
        )
    if find_spec("triton") is None:
        hint = "install triton, or use cpu"
        raise Unsupported("needs triton, which is not there", field="device", value=name, hint=hint)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The dtype an option names; "auto" is float32 on a CPU and bfloat16 on a GPU.

    Raises BadRequest for any other word.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        hint = f"known: auto, {', '.join(DTYPES)}"
        raise BadRequest("unknown dtype", field="dtype", value=name, hint=hint)
    return DTYPES[name]


def _context(options: EngineOptions, trained: int) -> int:
    """Most tokens of a request: as asked, else what training and the pool allow."""
    asked = options.max_context
    if asked is not None and asked > trained:
        raise BadRequest(
            f"the model was trained for {trained} tokens", field="max_context", value=asked
        )
    if asked is not None and options.kv_tokens is not None and asked > options.kv_tokens:
        raise BadRequest(
            "one request could not fit the cache",
            field="max_context",
            value=asked,
            hint=f"raise kv_tokens, which is {options.kv_tokens}",
        )
    return min(asked or trained, options.kv_tokens or trained)


def _default_pages(options: EngineOptions, context: int) -> int:
    """Pages of the pool where nobody counts them: as many as asked for, or enough."""
    tokens = options.kv_tokens or max(DEFAULT_KV_TOKENS, context)
    return -(-tokens // options.page_size)
