"""EAGLE-3 in flat configs: as its authors keep it, and as SpecForge writes and SGLang reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from furcate.errors import BadFile, Unsupported
from furcate.heads.formats.configs import (
    block_from_hf,
    block_to_hf,
    count,
    flag,
    layer_ids,
    must_be,
)
from furcate.heads.formats.draft_ids import D2T, T2D, read_draft_ids, rows_in_order
from furcate.heads.formats.shipment import Shipment, Written, refuse
from furcate.heads.formats.source import Source
from furcate.heads.held import Held
from furcate.heads.places import EMBEDDING, OUTPUT
from furcate.heads.spec import EagleSpec
from furcate.heads.tensor_files import Kepts
from furcate.models.spec import DecoderSpec

__all__ = [
    "EAGLE3_KEYS",
    "EAGLE3_SGLANG",
    "Asked",
    "assemble",
    "checked_eagle3",
    "default_layers",
    "read_eagle3",
    "read_eagle3_sglang",
    "write_eagle3",
    "write_eagle3_sglang",
]

EAGLE3_SGLANG = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
NUMBERED = "furcate_layers"  # our own numbering, written beside the format's
IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE3_KEYS = frozenset(
    {
        "draft_vocab_size",
        IDS,
        "eagle_config",
        "fc_norm",
        "norm_before_fc",
        "norm_before_residual",
        "norm_output",
        "num_aux_hidden_states",
        "target_hidden_size",
        "use_aux_hidden_state",
        "use_aux_norm",
    }
)
_OWN = EAGLE3_KEYS | {"bias", "logit_scale", "target_model_type", NUMBERED}
_OLD_NAMES = (
    ("midlayer.", "layers.0."),
    ("aux_norm_low.", "fc_norm.0."),
    ("aux_norm_mid.", "fc_norm.1."),
    ("aux_norm_high.", "fc_norm.2."),
)
_PARALLEL = ("mask_hidden", "mask_token_id", "parallel_drafting", "ptd_token_id")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a config says of an EAGLE-3 head, beside the sizes of its layers."""

    block: DecoderSpec
    keys: Mapping[str, Any]  # flat, in the words of EAGLE3_KEYS
    layers: tuple[int, ...]  # in our numbering
    norm_before_residual: bool
    fc_bias: bool = False


def default_layers(target: DecoderSpec) -> tuple[int, ...]:
    """What every engine reads where a config names no layers: a low, a middle and a high one."""
    return (2, target.num_layers // 2, target.num_layers - 3)


def read_eagle3(source: Source, target: DecoderSpec, layers: tuple[int, ...] | None = None) -> Held:
    """The authors' layout. Raises BadFile where layers are named: nobody agrees on their count."""
    keys = _flat(source.config)
    named = layer_ids(keys, IDS)
    if named is not None and layers is None:
        raise BadFile(
            "may count outputs or inputs of layers; this layout does not say",
            field=IDS,
            value=named,
            hint="give --layers in furcate's count: state k is what enters layer k",
        )
    return _read(source, keys, layers or default_layers(target))


def read_eagle3_sglang(
    source: Source, target: DecoderSpec, layers: tuple[int, ...] | None = None
) -> Held:
    """SpecForge's and SGLang's: layers are named by their outputs, one less than our states."""
    keys = _flat(source.config)
    named = layer_ids(keys, IDS)
    told = default_layers(target) if named is None else tuple(layer + 1 for layer in named)
    own = layer_ids(source.config, NUMBERED)
    if own is not None and own != told:
        raise BadFile(f"contradicts {IDS}, which means {told}", field=NUMBERED, value=own)
    return _read(source, keys, layers or told)


def write_eagle3(shipment: Shipment) -> Written:
    """The authors' layout, whose program has no flags at all."""
    spec = checked_eagle3(shipment)
    refuse("original", _beyond(spec) | {name: getattr(spec, name) for name in _NORMS})
    if spec.layers != default_layers(shipment.target):
        hint = f"this layout knows {default_layers(shipment.target)} alone; write it for sglang"
        refuse("original", {"layers": spec.layers}, hint)
    config = _config(spec, shipment, "LlamaForCausalLM")
    config["draft_vocab_size"] = spec.draft_vocab_size
    tensors = shipment.own() | shipment.rows()
    return Written(config, _renamed(tensors, "layers.0.", "midlayer."))


def write_eagle3_sglang(shipment: Shipment) -> Written:
    """SGLang's: three things it computes in its own way are refused, the rest is explicit."""
    spec = checked_eagle3(shipment)
    refuse("sglang", _beyond(spec) | {"norm_before_residual": spec.norm_before_residual})
    same_size = spec.block.hidden_size == spec.target_hidden_size
    if spec.own_embedding and same_size:
        refuse("sglang", {"own_embedding": True}, "SGLang takes the target's embeddings")
    if len(spec.layers) * spec.target_hidden_size == spec.block.hidden_size:
        refuse("sglang", {"layers": spec.layers}, "SGLang skips fc where it keeps the size")
    if shipment.target.num_layers in spec.layers:
        refuse("sglang", {"layers": spec.layers}, "SGLang hands out what enters a layer alone")
    named = [layer - 1 for layer in spec.layers]
    if min(named) < 0:
        refuse("sglang", {"layers": spec.layers}, "SGLang counts outputs of layers from 0 on")
    whole = spec.draft_vocab_size == spec.vocab_size and not spec.own_output
    config = _config(spec, shipment, EAGLE3_SGLANG[0]) | {
        # null: SGLang takes the target's whole matrix
        "draft_vocab_size": None if whole else spec.draft_vocab_size,
        "num_aux_hidden_states": len(spec.layers),
        "eagle_config": {
            IDS: named,
            "use_aux_hidden_state": True,
            "norm_before_fc": spec.norm_before_fc,
        },
        NUMBERED: list(spec.layers),
    }
    return Written(config, shipment.own() | ({} if whole else shipment.rows()))


def assemble(source: Source, asked: Asked) -> Held:
    """A head from what its config says and its tensors, which are named as ours are."""
    tensors = dict(source.tensors)
    vocab = asked.block.vocab_size
    draft = count(asked.keys, "draft_vocab_size", vocab)
    spec = EagleSpec(
        kind="eagle3",
        block=asked.block,
        target_hidden_size=count(asked.keys, "target_hidden_size", asked.block.hidden_size),
        layers=asked.layers,
        draft_vocab_size=draft,
        own_embedding=EMBEDDING in tensors,
        own_output=OUTPUT in tensors or draft < vocab,
        fc_bias=asked.fc_bias,
        norm_before_residual=asked.norm_before_residual,
        norm_before_fc=flag(asked.keys, "norm_before_fc", False),
        fc_norm=flag(asked.keys, "fc_norm", flag(asked.keys, "use_aux_norm", False)),
        norm_output=flag(asked.keys, "norm_output", False),
    )
    ids = read_draft_ids(tensors, draft, vocab)
    named = count(asked.keys, "num_aux_hidden_states", len(spec.layers))
    if named != len(spec.layers):
        raise BadFile(
            f"{len(spec.layers)} layers are read", field="num_aux_hidden_states", value=named
        )
    if ids.order_D is not None and OUTPUT in tensors:
        tensors[OUTPUT] = rows_in_order(tensors[OUTPUT], ids.order_D)
    kept = {name: each for name, each in tensors.items() if name not in (D2T, T2D)}
    return Held(
        spec,
        kept,
        token_D=ids.token_D,
        fingerprint=source.fingerprint,
        faults=() if ids.fault is None else (ids.fault,),
        remarks=() if ids.order_D is None else ("d2t does not ascend: rows are put in order",),
    )


def checked_eagle3(shipment: Shipment) -> EagleSpec:
    """The spec of an EAGLE-3 head; raises BadFile for any other."""
    spec = shipment.held.spec
    if not isinstance(spec, EagleSpec) or spec.kind != "eagle3":
        raise BadFile("is no EAGLE-3 head", field="kind", value=spec.kind)
    return spec


_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _read(source: Source, keys: Mapping[str, Any], layers: tuple[int, ...]) -> Held:
    config = source.config
    must_be(config, "logit_scale", 1, 1.0, why="scores are not scaled")
    must_be(config, "tie_word_embeddings", False, why="the output matrix must be stored")
    must_be(keys, "use_aux_hidden_state", True, why="EAGLE-3 fuses several layers")
    block = block_from_hf(config, _OWN, ("llama",))
    if block.num_layers != 1:
        raise Unsupported(
            "heads of several layers differ between engines in this layout",
            field="num_hidden_layers",
            value=block.num_layers,
            hint="the speculators layout says what each layer does",
        )
    before = flag(keys, "norm_before_residual", False)
    asked = Asked(block, keys, layers, before, fc_bias=flag(config, "bias", False))
    return assemble(_with_our_names(source), asked)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `eagle_config` and those outside together; they must not contradict each other."""
    for key in _PARALLEL:
        if config.get(key) is not None and config.get(key) is not False:
            raise Unsupported(
                "drafting all depths at once (P-EAGLE) is not read", field=key, value=config[key]
            )
    nested = config.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise BadFile("must be a JSON object", field="eagle_config", value=nested)
    flat = {key: config[key] for key in EAGLE3_KEYS if config.get(key) is not None}
    for key, value in nested.items():
        if key not in EAGLE3_KEYS:
            raise Unsupported("is not known", field=f"eagle_config.{key}", value=value)
        if value is not None and flat.setdefault(key, value) != value:
            raise BadFile(f"contradicts {key} outside", field=f"eagle_config.{key}", value=value)
    flat.pop("eagle_config", None)
    return flat


def _with_our_names(source: Source) -> Source:
    tensors: Kepts = source.tensors
    if "mask_hidden" in tensors:
        raise Unsupported("drafting all depths at once (P-EAGLE) is not read", field="mask_hidden")
    for old, new in _OLD_NAMES:
        tensors = _renamed(tensors, old, new)
    return Source(source.path, source.config, tensors, source.fingerprint)


def _renamed(tensors: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Names that begin with `old` begin with `new`."""
    return {
        new + name.removeprefix(old) if name.startswith(old) else name: each
        for name, each in tensors.items()
    }


def _beyond(spec: EagleSpec) -> dict[str, object]:
    """What neither layout can say."""
    block = spec.block
    return {
        "fc_bias": spec.fc_bias,
        "qkv_bias": block.qkv_bias,
        "o_bias": block.o_bias,
        "mlp_bias": block.mlp_bias,
        "qk_norm": block.qk_norm,
        "more than one layer": block.num_layers > 1,
    }


def _config(spec: EagleSpec, shipment: Shipment, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        **block_to_hf(spec.block, shipment.held.dtype),
        "target_hidden_size": spec.target_hidden_size,
        **{name: getattr(spec, name) for name in _NORMS},
    }
