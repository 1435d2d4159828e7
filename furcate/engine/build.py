"""From options to a ready engine: what was asked and what was decided are two things."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from furcate.config import DraftOptions, EngineOptions
from furcate.drafters.base import Drafter
from furcate.drafters.make import Setting, make_drafter
from furcate.engine.asking import Limits
from furcate.engine.graphs import CudaRecorder, Graphs
from furcate.engine.player import Eager, Player
from furcate.engine.round import Round
from furcate.engine.scheduler import Scheduler
from furcate.engine.state import State, StateShape
from furcate.engine.target import Target
from furcate.errors import BadFile, BadRequest, Unsupported
from furcate.kernels.backend import kernels_of
from furcate.kv.book import PageBook
from furcate.kv.cache import CacheShape, PagedCache
from furcate.models.decoder import Decoder
from furcate.models.load import load_decoder
from furcate.models.zoo import resolve
from furcate.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Built", "build", "device_of", "dtype_of", "load"]

DEFAULT_KV_TOKENS = 32768  # on the CPU untouched pages cost nothing
DEFAULT_NODES = 63
GPU_KV_SHARE = 0.6  # of the memory that is free once the weights are loaded


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


def load(
    target: str | Path, drafter: str | Path, options: EngineOptions, draft: DraftOptions
) -> Built:
    """Load a target and build an engine around it; see `Engine.load`."""
    device = device_of(options.device)
    dtype = dtype_of(options.dtype, device)
    path = resolve(target)
    tokenizer = load_tokenizer(path)
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

    `home` is where the target came from.
    """
    _check_vocabulary(decoder, tokenizer)
    context = _context(options, decoder.spec.max_position)
    pages = -(-_kv_tokens(options, decoder, context) // options.page_size)
    shape = CacheShape(
        layers=decoder.spec.num_layers,
        kv_heads=decoder.spec.num_kv_heads,
        head_dim=decoder.spec.head_dim,
        pages=pages,
        page_size=options.page_size,
    )
    kernels = kernels_of(decoder.device)
    cache = PagedCache(shape, decoder.dtype, decoder.device, kernels)
    setting = Setting(decoder, tokenizer, shape, options.max_batch, draft, kernels, home)
    guess = make_drafter(drafter, setting) if isinstance(drafter, str | Path) else drafter
    most_nodes = _most_nodes(draft, guess)
    state = State(
        StateShape(
            capacity=options.max_batch,
            context=context,
            levels=guess.depth + 1,
            pages=-(-(context + most_nodes + 1) // options.page_size),
            pool=guess.pool,
            vocab=decoder.spec.vocab_size,
        ),
        decoder.device,
    )
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
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadRequest("no such device", field="device", value=name, hint="cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise Unsupported("furcate runs on cpu and cuda", field="device", value=name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadRequest("no CUDA device is there", field="device", value=name, hint="use cpu")
    return device


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """The dtype an option names; "auto" is float32 on a CPU and bfloat16 on a GPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    known: torch.dtype = getattr(torch, name)
    return known


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


def _kv_tokens(options: EngineOptions, decoder: Decoder, context: int) -> int:
    """Room of the paged cache, in tokens."""
    if options.kv_tokens is not None:
        return options.kv_tokens
    if decoder.device.type == "cpu":
        return max(DEFAULT_KV_TOKENS, context)
    spec = decoder.spec
    token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * decoder.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(decoder.device)
    room = int(free * GPU_KV_SHARE) // token
    if room < context:
        raise BadRequest(
            f"the cache has room for {room} tokens, one request may need {context}",
            field="max_context",
            hint="lower max_context, or free memory on the device",
        )
    return min(room, options.max_batch * context)
