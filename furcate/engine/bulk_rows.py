"""The rows of a bulk run on the device: every step moves each row by one token, unseen by the host.

Legend: B rows, S positions of a row, F entries of a tape, N rows that are loaded or read, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from furcate.engine.bulk_backend import backend_for
from furcate.engine.bulk_script import END, SAMPLE, Limits, Tape
from furcate.errors import BadRequest
from furcate.kv.cache import CacheShape, PagedCache
from furcate.models.decoder import Decoder

__all__ = ["Look", "Rows", "check_room"]

PAGE_SIZE = 64


@dataclass(frozen=True, slots=True)
class Look:
    """Where the rows stand."""

    idle_B: NDArray[np.bool_]
    broken_B: NDArray[np.bool_]  # ended because the logits were not finite
    length_B: NDArray[np.int64]  # tokens of each row


class Rows:
    """`batch` sequences in the making, each with its tape; at first all are idle.

    Raises BadRequest where the device has no room for the keys and values.
    """

    def __init__(self, decoder: Decoder, batch: int, limits: Limits) -> None:
        self._decoder = decoder
        device, context = decoder.device, limits.context
        shape = _cache_shape(decoder, batch, context)
        if device.type == "cuda":
            check_room(shape, decoder.dtype, batch, torch.cuda.mem_get_info(device)[0])
        cache = PagedCache(shape, decoder.dtype, device)
        self._backend = backend_for(decoder, cache, batch)
        self._context = context

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(batch, *size, dtype=dtype, device=device)

        self._stop_X = torch.tensor(limits.stop_ids, device=device)
        entries = 2 * context + 2
        self._entry_BF = zeros(entries)
        self._temperature_BF = zeros(entries, dtype=torch.float32)
        self._most_BF = zeros(entries)
        self._seed_B = zeros()
        self._token_BS = zeros(context)
        self._from_BS = zeros(context)  # the entry that each token came from
        self._position_B = zeros()  # of the last token
        self._cursor_B = zeros()  # the entry that the next token comes from
        self._count_B = zeros()  # tokens that this entry has given
        self._idle_B = zeros(dtype=torch.bool).fill_(True)
        self._broken_B = zeros(dtype=torch.bool)
        with torch.inference_mode():
            self._run = self._backend.ready(self._step)

    @torch.inference_mode()
    def run(self, steps: int) -> None:
        """Move every row by `steps` tokens, or until its end; a GPU is not waited for."""
        for _ in range(steps):
            self._run()

    @torch.inference_mode()
    def look(self) -> Look:
        """Where the rows stand; waits for the device."""
        states = (self._idle_B.long(), self._broken_B.long(), self._position_B + 1)
        idle_B, broken_B, length_B = torch.stack(states).cpu().numpy()
        return Look(idle_B.astype(bool), broken_B.astype(bool), length_B)

    @torch.inference_mode()
    def load(self, rows: Sequence[int], tapes: Sequence[Tape]) -> None:
        """Put new tapes into idle rows."""
        row_N = self._sent(np.array(rows))
        width = max(len(tape.entry_F) for tape in tapes)
        for name, at in (("entry_F", self._entry_BF), ("temperature_F", self._temperature_BF)):
            at[row_N, :width] = self._sent(_padded([getattr(tape, name) for tape in tapes], width))
        self._most_BF[row_N, :width] = self._sent(_padded([tape.most_F for tape in tapes], width))
        self._seed_B[row_N] = self._sent(np.array([tape.seed for tape in tapes]))
        self._token_BS[row_N, 0] = self._entry_BF[row_N, 0]
        self._from_BS[row_N, 0] = 0
        self._cursor_B[row_N] = 1
        for at in (self._position_B, self._count_B, self._idle_B, self._broken_B):
            at[row_N] = 0

    @torch.inference_mode()
    def read(self, rows: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of some rows, and the entries of their tapes that these came from, [N, S]."""
        row_N = self._sent(np.array(rows))
        token_NS, from_NS = torch.stack((self._token_BS[row_N], self._from_BS[row_N])).cpu().numpy()
        return token_NS, from_NS

    def _sent(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._decoder.device)

    def _step(self) -> None:
        """One token for every row; idle rows score their first token and keep their state."""
        at_B = torch.where(self._idle_B, 0, self._position_B)
        token_B = _pick(self._token_BS, at_B)
        hidden_BC = self._decoder(token_B, at_B, self._backend.attend(at_B))
        logits_BV = self._decoder.logits(hidden_BC)
        sampling = (_pick(self._temperature_BF, self._cursor_B), self._seed_B, at_B + 1)
        self._advance(at_B + 1, *self._backend.choose(logits_BV, sampling))

    def _advance(self, to_B: Tensor, choice_B: Tensor, broken_B: Tensor) -> None:
        """Take each row's next token from its tape or from the choice, and turn the tape."""
        entry_B = _pick(self._entry_BF, self._cursor_B)
        samples_B = entry_B == SAMPLE
        token_B = torch.where(samples_B, choice_B, entry_B)
        stopped_B = samples_B & (token_B[:, None] == self._stop_X).any(1)
        count_B = self._count_B + samples_B
        over_B = ~samples_B | stopped_B | (count_B == _pick(self._most_BF, self._cursor_B))
        cursor_B = self._cursor_B + over_B.long() + stopped_B
        broken_B = samples_B & broken_B
        at_end_B = _pick(self._entry_BF, cursor_B) == END
        idle_B = at_end_B | (to_B == self._context - 1) | broken_B
        busy_B = ~self._idle_B
        _put(self._token_BS, to_B, token_B, busy_B)
        _put(self._from_BS, to_B, self._cursor_B, busy_B)
        for state_B, new_B in (
            (self._position_B, to_B),
            (self._cursor_B, cursor_B),
            (self._count_B, torch.where(over_B, 0, count_B)),
            (self._broken_B, broken_B),
            (self._idle_B, idle_B),
        ):
            state_B.copy_(torch.where(busy_B, new_B, state_B))


def check_room(shape: CacheShape, dtype: torch.dtype, batch: int, free_bytes: int) -> None:
    """Raises BadRequest where keys and values would not fit the free memory."""
    need = shape.bytes(dtype)
    if need <= free_bytes:
        return
    raise BadRequest(
        f"keys and values of {batch} rows of {shape.pages // batch * shape.page_size} tokens need "
        f"{need / 2**30:.1f} GiB, and {free_bytes / 2**30:.1f} GiB are free",
        field="batch",
        value=batch,
        hint="lower batch or context, or free memory on the device",
    )


def _cache_shape(decoder: Decoder, batch: int, context: int) -> CacheShape:
    spec = decoder.spec
    pages = batch * -(-context // PAGE_SIZE)
    return CacheShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, pages, PAGE_SIZE)


def _padded(arrays: Sequence[NDArray[np.generic]], width: int) -> NDArray[np.generic]:
    """One array a row; nobody reads behind a tape's end."""
    out = np.zeros((len(arrays), width), arrays[0].dtype)
    for row, array in zip(out, arrays, strict=True):
        row[: len(array)] = array
    return out


def _pick(from_BX: Tensor, at_B: Tensor) -> Tensor:
    return from_BX.gather(1, at_B[:, None])[:, 0]


def _put(into_BX: Tensor, at_B: Tensor, value_B: Tensor, where_B: Tensor) -> None:
    kept_B = torch.where(where_B, value_B, _pick(into_BX, at_B))
    into_BX.scatter_(1, at_B[:, None], kept_B[:, None])
