"""What a head's directory holds, whatever its format, and what may be wrong with it.

Legend: D draft vocabulary, N tokens by frequency, V vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from furcate.errors import BadFile, UserError
from furcate.heads.places import draw, places
from furcate.heads.spec import HeadSpec
from furcate.heads.tensor_files import REFETCH, Kept, Kepts, finite
from furcate.models.spec import DecoderSpec

__all__ = ["Held", "misfits", "problems", "some", "unsound"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Held:
    """A head as it is stored: what it is, its own tensors by our names, and what lies beside them.

    Args:
        token_D: int64, ascending: the target's ids of the rows of an own output matrix that has
            fewer rows than the target has tokens; None otherwise.
        frequent_N: int64, the target's ids by falling frequency in its own text, where known.
        fingerprint: of the target's vocabulary, where known.
        provenance: how it came to be, a JSON object.
        calibration: a record of tree/calibration.py, where there is one.
        faults: what was found wrong while reading, and did not keep the rest from being read.
        remarks: what its owner should know, and what furcate made of it.
    """

    spec: HeadSpec
    tensors: Kepts
    token_D: Tensor | None = None
    frequent_N: Tensor | None = None
    fingerprint: str | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] | None = None
    faults: tuple[UserError, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Of its first weight, which all others share in every file known."""
        return next(iter(self.tensors.values())).dtype


def problems(held: Held) -> Iterator[UserError]:
    """Everything that is wrong with names, shapes, types and ids; no weight is read for it."""
    yield from held.faults
    wanted = {name: tuple(place.shape) for name, place in places(draw(held.spec)).items()}
    yield from _names(wanted, held.tensors)
    for name, kept in held.tensors.items():
        if kept.dtype not in _FLOATS:
            yield BadFile("must hold floating point numbers", field=kept.name, value=kept.dtype)
        if name in wanted and kept.shape != wanted[name]:
            yield BadFile(
                f"the config asks for shape {wanted[name]}", field=kept.name, value=kept.shape
            )
    yield from _ids(held)


def unsound(held: Held) -> Iterator[UserError]:
    """Every tensor that holds NaN or infinite numbers; reads them all."""
    for kept in held.tensors.values():
        if kept.dtype in _FLOATS and not finite(kept.read()):
            yield BadFile("holds numbers that are not finite", field=kept.name, hint=REFETCH)


def misfits(spec: HeadSpec, target: DecoderSpec) -> Iterator[UserError]:
    """Everything in which a head and a target do not fit together."""
    hint = "this head was made for another target"
    for name, own, wanted in (
        ("hidden_size", spec.target_hidden_size, target.hidden_size),
        ("vocab_size", spec.vocab_size, target.vocab_size),
    ):
        if own != wanted:
            yield BadFile(f"the target has {wanted}", field=name, value=own, hint=hint)
    last = target.num_layers
    if spec.kind != "eagle3" and spec.layers != (last,):
        yield BadFile(
            f"must be the final state alone, ({last},)",
            field="layers",
            value=spec.layers,
            hint=hint,
        )
    for layer in spec.layers:
        if spec.kind == "eagle3" and not 0 <= layer <= last:
            yield BadFile(
                f"the target has states 0 to {last}", field="layers", value=layer, hint=hint
            )


def some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    all_names = list(names)
    more = len(all_names) - _SHOWN
    return ", ".join(all_names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _names(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, Kept]) -> Iterator[UserError]:
    missing = [name for name in wanted if name not in found]
    if missing:
        yield BadFile(
            "tensors are missing",
            field=missing[0],
            value=some(missing),
            hint="the checkpoint is incomplete, or its config describes another head",
        )
    extra = [kept.name for name, kept in found.items() if name not in wanted]
    if extra:
        yield BadFile(
            "tensors that this head does not have",
            field=extra[0],
            value=some(extra),
            hint="the config describes another head",
        )


def _ids(held: Held) -> Iterator[UserError]:
    spec = held.spec
    reduced = spec.draft_vocab_size < spec.vocab_size
    if held.frequent_N is not None:
        yield from _listed("frequent", held.frequent_N, spec.vocab_size)
    if held.token_D is not None:
        yield from _listed("token_ids", held.token_D, spec.vocab_size)
        if bool((held.token_D.diff() <= 0).any()):
            yield BadFile("must ascend", field="token_ids")
    if reduced and spec.own_output and held.token_D is None:
        yield BadFile(
            "nothing says which tokens the rows of its output matrix stand for",
            field="draft_vocab_size",
            value=spec.draft_vocab_size,
            hint="the file needs d2t; without it draft ids would be taken for the first tokens",
        )
    if reduced and not spec.own_output and _count(held.frequent_N) < spec.draft_vocab_size:
        yield BadFile(
            f"only {_count(held.frequent_N)} tokens are listed by frequency",
            field="draft_vocab_size",
            value=spec.draft_vocab_size,
        )
    needed = spec.draft_vocab_size if reduced and spec.own_output else 0
    if held.token_D is not None and len(held.token_D) != needed:
        yield BadFile(f"must have {needed} entries", field="token_ids", value=len(held.token_D))


def _listed(name: str, ids_X: Tensor, vocab: int) -> Iterator[UserError]:
    if ids_X.dim() != 1 or not len(ids_X):
        yield BadFile("must be a list of token ids", field=name, value=tuple(ids_X.shape))
        return
    low, high = int(ids_X.min()), int(ids_X.max())
    if low < 0 or high >= vocab:
        outside = low if low < 0 else high
        yield BadFile(f"token ids must be 0 to {vocab - 1}", field=name, value=outside)
    if len(set(ids_X.tolist())) != len(ids_X):
        yield BadFile("names a token twice", field=name)


def _count(ids_N: Tensor | None) -> int:
    return 0 if ids_N is None else len(ids_N)
