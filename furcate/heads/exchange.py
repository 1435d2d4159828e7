"""Heads of any format in, heads of any format out, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from furcate.errors import BadFile, BadRequest, Unsupported, UserError
from furcate.files import write_json
from furcate.heads.build import build, can_score, vocabulary
from furcate.heads.directory import whole_directory
from furcate.heads.formats.detect import NATIVE, Format, detect_source
from furcate.heads.formats.shipment import Shipment, Written
from furcate.heads.formats.source import CONFIG, Source, open_source
from furcate.heads.held import Held, misfits, problems, unsound
from furcate.heads.output import Shared
from furcate.heads.places import EMBEDDING, OUTPUT, Head
from furcate.heads.spec import EagleSpec
from furcate.heads.store import check_fingerprint, is_native, read_native, write_native
from furcate.heads.tensor_files import Kept, write_tensors
from furcate.models.decoder import Decoder
from furcate.models.spec import DecoderSpec

__all__ = ["Finding", "Target", "export_head", "import_head", "lint_head", "open_head", "read_head"]


@dataclass(frozen=True, slots=True)
class Target:
    """What a head is to draft for; its weights are loaded only where they are asked for."""

    spec: DecoderSpec
    load: Callable[[torch.dtype], Decoder]
    fingerprint: str | None = None
    name: str | None = None  # on the hub


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a head that its owner should know."""

    level: str  # error | warning
    field: str | None
    text: str


def open_head(
    directory: Path, target: DecoderSpec, layers: tuple[int, ...] | None = None
) -> tuple[Format, Held]:
    """The format of a head, and what its directory holds; weights are not read yet.

    Args:
        layers: which of the target's states it reads, in our count, where the files do not say it.
    """
    if is_native(directory):
        if layers is not None:
            raise BadRequest("this head says itself", field="layers", value=layers)
        return NATIVE, read_native(directory)
    source = open_source(directory)
    found = detect_source(source)
    return found, found.read(source, target, layers)


def read_head(
    directory: Path,
    target: Decoder,
    draft_vocab: int | None = None,
    *,
    fingerprint: str | None = None,
    most: int | None = None,
) -> Head:
    """A head of any format, frozen, in the target's dtype and on its device.

    Args and errors: as `store.load_head`; Unsupported for formats that are not read. `most` is how
    many tokens are enough where `draft_vocab` is open; heads that cannot score fewer ignore it.
    """
    _, held = open_head(directory, target.spec)
    check_fingerprint(held, fingerprint)
    if draft_vocab is None and most is not None and can_score(held, most):
        draft_vocab = most
    return build(held, target, draft_vocab)


def import_head(
    directory: Path, out: Path, target: Target, layers: tuple[int, ...] | None = None
) -> tuple[Format, Held]:
    """Write a head of any format as furcate's own, every flag explicit.

    Returns the format it was in, and what was written.

    What equals the target's is shared and not stored.

    Raises:
        BadFile, Unsupported: anything wrong with the head, or it is of another target.
        BadRequest, StorageFailed: as `store.save_head`.
    """
    found, held = open_head(directory, target.spec, layers)
    check_fingerprint(held, target.fingerprint)
    for problem in (*misfits(held.spec, target.spec), *problems(held)):
        raise problem
    held = _shared(held, target)
    if found is not NATIVE:
        origin = {"imported_from": found.name, "directory": directory.resolve().name}
        held = replace(held, fingerprint=target.fingerprint, provenance=origin)
    write_native(out, held)
    return found, held


def export_head(
    directory: Path, out: Path, to: Format, target: Target, draft_vocab: int | None = None
) -> Written:
    """Write a head of any format in another one; returns what was written.

    Args:
        draft_vocab: how many of the target's most frequent tokens it is to score; None: as stored.

    Raises:
        Unsupported: the format cannot say what this head is.
        BadFile, BadRequest, StorageFailed: as `import_head`.
    """
    _, held = open_head(directory, target.spec)
    check_fingerprint(held, target.fingerprint)
    for problem in (*misfits(held.spec, target.spec), *problems(held), *unsound(held)):
        raise problem
    token_D = vocabulary(held, draft_vocab)
    size = held.spec.vocab_size if token_D is None else len(token_D)
    held = replace(held, spec=replace(held.spec, draft_vocab_size=size))
    if to.write is None:
        raise Unsupported("is read and not written", field="format", value=to.name)
    shared = cache(lambda: Shared.of(target.load(held.dtype)))
    written = to.write(Shipment(held, target.spec, shared, target.name))
    with whole_directory(out, ours=lambda _: False, names=()) as place:
        write_json(place / CONFIG, dict(written.config))
        _write_weights(place / written.file, dict(written.tensors))
    return written


def lint_head(
    directory: Path, target: Target, layers: tuple[int, ...] | None = None
) -> list[Finding]:
    """Everything that is wrong with a head, or should be known; an empty list is a clean bill."""
    found: list[Finding] = []
    held = _opened(directory, target, layers, found)
    if held is None:
        return found
    for problem in (*misfits(held.spec, target.spec), *problems(held), *unsound(held)):
        found.append(_error(problem))
    try:
        check_fingerprint(held, target.fingerprint)
    except BadFile as problem:
        found.append(_error(problem))
    return [*found, *_warnings(held, target)]


def _opened(
    directory: Path, target: Target, layers: tuple[int, ...] | None, found: list[Finding]
) -> Held | None:
    """Reads on past keys that are not known, so that all of them are told at once."""
    try:
        if is_native(directory):
            return open_head(directory, target.spec, layers)[1]
        source = open_source(directory)
        format_ = detect_source(source)
    except UserError as problem:
        found.append(_error(problem))
        return None
    while True:
        try:
            return format_.read(source, target.spec, layers)
        except UserError as problem:
            if problem.field not in [each.field for each in found]:
                found.append(_error(problem))
            shorter = _past(source, problem)
            if shorter is None:
                return None
            source = shorter


def _past(source: Source, problem: UserError) -> Source | None:
    skippable = isinstance(problem, Unsupported) and problem.field in source.config
    return source.without(problem.field) if skippable and problem.field else None


def _warnings(held: Held, target: Target) -> Iterator[Finding]:
    for remark in held.remarks:
        yield Finding("warning", None, remark)
    block = getattr(held.spec, "block", None)
    if block is not None and block.max_position < target.spec.max_position:
        text = (
            f"{block.max_position} positions are fewer than the target's "
            f"{target.spec.max_position}: beyond them acceptance falls, the output stays the same"
        )
        yield Finding("warning", "max_position", text)
    if held.fingerprint is None:
        text = "nothing says which tokenizer this head was made for; compare it yourself"
        yield Finding("warning", "fingerprint", text)
    for name, kept in held.tensors.items():
        if name.endswith("weight") and kept.dtype.is_floating_point and not bool(kept.read().any()):
            yield Finding("warning", kept.name, "holds zeros alone: it was never trained")


def _error(problem: UserError) -> Finding:
    return Finding("error", problem.field, str(problem))


def _shared(held: Held, target: Target) -> Held:
    """Without embeddings and whole output matrices that are bit for bit the target's."""
    spec = held.spec
    outputs = [name for name in held.tensors if name.endswith(OUTPUT)]
    whole = spec.draft_vocab_size == spec.vocab_size
    embedding = held.tensors.get(EMBEDDING)
    if embedding is None and not (outputs and whole):
        return held
    shared, dropped = Shared.of(target.load(held.dtype)), set()
    alike = embedding is not None and _same(embedding, shared.embedding_VC)
    if alike and isinstance(spec, EagleSpec):
        dropped.add(EMBEDDING)
        spec = replace(spec, own_embedding=False)
    if outputs and whole and all(_same(held.tensors[o], shared.output_VC) for o in outputs):
        dropped.update(outputs)
        spec = replace(spec, own_output=False)
    kept = {name: each for name, each in held.tensors.items() if name not in dropped}
    return replace(held, spec=spec, tensors=kept)


def _same(kept: Kept, matrix_VC: Tensor) -> bool:
    return kept.shape == tuple(matrix_VC.shape) and torch.equal(
        kept.read(), matrix_VC.to("cpu", kept.dtype)
    )


def _write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    if path.suffix == ".safetensors":
        write_tensors(path, tensors)
    else:
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        try:
            torch.save(whole, path)
        except RuntimeError as fault:  # its writer's word for a full disk
            raise OSError(str(fault)) from fault
