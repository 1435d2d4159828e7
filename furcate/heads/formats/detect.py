"""Which format a directory is in, and what each can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from furcate.errors import BadFile, BadRequest, Unsupported
from furcate.heads.formats import eagle1, eagle3, medusa, mtp, speculators
from furcate.heads.formats.shipment import Shipment, Written
from furcate.heads.formats.source import MEDUSA_PICKLE, Source, open_source
from furcate.heads.held import Held
from furcate.heads.store import is_native, read_native
from furcate.models.spec import DecoderSpec

__all__ = ["FORMATS", "NATIVE", "Format", "Reader", "detect", "detect_source", "format_named"]

Reader = Callable[[Source, DecoderSpec, tuple[int, ...] | None], Held]
Writer = Callable[[Shipment], Written]


@dataclass(frozen=True, slots=True)
class Format:
    """A way of keeping a head."""

    name: str
    about: str
    read: Reader
    write: Writer | None = None


def _fixed(read: Callable[[Source, DecoderSpec], Held]) -> Reader:
    """A reader of heads whose features cannot be chosen."""

    def reader(source: Source, target: DecoderSpec, layers: tuple[int, ...] | None) -> Held:
        if layers is not None:
            raise BadRequest("only EAGLE-3 has layers to choose", field="layers", value=layers)
        return read(source, target)

    return reader


NATIVE = Format("furcate", "furcate's own", _fixed(lambda source, _: read_native(source.path)))
_EAGLE1 = Format(
    "eagle1-original",
    "EAGLE-1 and 2, the authors' layout",
    _fixed(eagle1.read_eagle1),
    eagle1.write_eagle1,
)
_EAGLE1_SGLANG = Format(
    "eagle1-sglang",
    "EAGLE-1 and 2 for SGLang",
    _fixed(eagle1.read_eagle1_sglang),
    eagle1.write_eagle1_sglang,
)
_EAGLE3 = Format(
    "eagle3-original", "EAGLE-3, the authors' layout", eagle3.read_eagle3, eagle3.write_eagle3
)
_EAGLE3_SGLANG = Format(
    "eagle3-sglang",
    "EAGLE-3 of SpecForge, for SGLang",
    eagle3.read_eagle3_sglang,
    eagle3.write_eagle3_sglang,
)
_SPECULATORS = Format(
    "speculators",
    "EAGLE-3 of vllm-project/speculators",
    speculators.read_speculators,
    speculators.write_speculators,
)
_MEDUSA = Format(
    "medusa-original",
    "Medusa, the authors' medusa_lm_head.pt",
    _fixed(medusa.read_medusa),
    medusa.write_medusa,
)
_MEDUSA_VLLM = Format(
    "medusa-vllm", "Medusa, vLLM's former layout", _fixed(medusa.read_medusa_vllm)
)
_MTP_DEEPSEEK = Format(
    "mtp-deepseek", "MTP inside a target, DeepSeek's names", _fixed(mtp.read_mtp_deepseek)
)
_MTP_QWEN = Format("mtp-qwen", "MTP inside a target, Qwen's names", _fixed(mtp.read_mtp_qwen))

FORMATS = (
    NATIVE,
    _EAGLE1,
    _EAGLE1_SGLANG,
    _EAGLE3,
    _EAGLE3_SGLANG,
    _SPECULATORS,
    _MEDUSA,
    _MEDUSA_VLLM,
    _MTP_DEEPSEEK,
    _MTP_QWEN,
)
_EAGLE3_MARKS = ("midlayer.", "hidden_norm.", "d2t", "t2d")


def format_named(name: str) -> Format:
    """Raises BadRequest for a name that no format has."""
    for each in FORMATS:
        if each.name == name:
            return each
    known = ", ".join(each.name for each in FORMATS)
    raise BadRequest("unknown format", field="format", value=name, hint=f"known: {known}")


def detect(directory: Path) -> Format:
    """The format of the head in a directory.

    Raises BadFile where there is no head or its config contradicts its weights, Unsupported for
    formats that are known and not read.
    """
    return NATIVE if is_native(directory) else detect_source(open_source(directory))


def detect_source(source: Source) -> Format:
    """The same for a directory that is not furcate's own."""
    config = source.config
    if speculators.TYPE_KEY in config:
        return _SPECULATORS
    if "medusa_num_heads" in config or (source.path / MEDUSA_PICKLE).is_file():
        return _MEDUSA
    if config.get("model_type") == "medusa":
        return _MEDUSA_VLLM
    classes = config.get("architectures") or [None]
    if not isinstance(classes, list):
        raise BadFile("must be a list", field="architectures", value=classes)
    if classes[0] in eagle3.EAGLE3_SGLANG:
        return _EAGLE3_SGLANG
    if classes[0] in eagle1.EAGLE1_SGLANG:
        _refuse_eagle3(source)
        return _EAGLE1_SGLANG
    return _by_weights(source)


def _by_weights(source: Source) -> Format:
    """Originals call themselves plain Llamas."""
    if eagle3.EAGLE3_KEYS & source.config.keys():
        return _EAGLE3
    if any(name.startswith(mtp.QWEN_PREFIX) for name in source.tensors):
        return _MTP_QWEN
    if source.config.get(mtp.MODULES):
        return _MTP_DEEPSEEK
    _refuse_eagle3(source)
    if "fc.weight" in source.tensors:
        return _EAGLE1
    raise Unsupported(
        "holds no head that furcate knows",
        field=str(source.path),
        hint="a whole small model is named as a drafter by its own path",
    )


def _refuse_eagle3(source: Source) -> None:
    """Under the wrong name engines skip fc and accept nothing, silently."""
    for name in source.tensors:
        if any(mark in name for mark in _EAGLE3_MARKS):
            raise BadFile(
                "belongs to EAGLE-3, but the config is one of EAGLE-1",
                field=name,
                value=source.config.get("architectures"),
                hint=f"make it architectures: [{eagle3.EAGLE3_SGLANG[0]!r}], draft_vocab_size: ...",
            )
