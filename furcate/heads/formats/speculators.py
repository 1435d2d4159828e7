"""EAGLE-3 as vllm-project/speculators keeps it: the layer's config nested, the verifier named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from furcate.errors import BadFile, Unsupported
from furcate.heads.formats.configs import (
    block_from_hf,
    block_to_hf,
    count,
    flag,
    layer_ids,
    must_be,
    refuse_unknown,
)
from furcate.heads.formats.eagle3 import (
    IDS,
    Asked,
    assemble,
    checked_eagle3,
    default_layers,
)
from furcate.heads.formats.shipment import Shipment, Written, refuse
from furcate.heads.formats.source import Source
from furcate.heads.held import Held
from furcate.models.spec import DecoderSpec

__all__ = ["TYPE_KEY", "read_speculators", "write_speculators"]

TYPE_KEY = "speculators_model_type"
_VERSION = "0.9.0"
_DRAFT = 32000  # draft_vocab_size where a config leaves it out
_TOKENS = 5  # drafted in a row by default, as engines' own settings have it
_LAYER = "transformer_layer_config"
_KNOWN = frozenset(
    f"""
    architectures auto_map draft_vocab_size dtype {IDS} embed_requires_grad fc_norm
    has_no_defaults_at_init norm_before_fc norm_before_residual norm_output _name_or_path
    {TYPE_KEY} speculators_config speculators_version target_hidden_size torch_dtype {_LAYER}
    transformers_version
    """.split()
)
_PROPOSAL = ("proposal_type", "speculative_tokens", "verifier_accept_k", "accept_tolerance")
# a saved config leaves out what equals its class's defaults
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
    },
}


def read_speculators(
    source: Source, target: DecoderSpec, layers: tuple[int, ...] | None = None
) -> Held:
    """Raises Unsupported for other algorithms and for lossy acceptance, BadFile otherwise.

    `norm_before_residual` must be there: speculators takes a missing one for false, vLLM for true.
    """
    config = source.config
    if config.get(TYPE_KEY) != "eagle3":
        raise Unsupported(
            "heads of this algorithm are not read", field=TYPE_KEY, value=config.get(TYPE_KEY)
        )
    refuse_unknown(config, _KNOWN)
    _refuse_lossy(config.get("speculators_config"))
    if config.get("norm_before_residual") is None:
        raise BadFile(
            "is missing, and engines disagree on its default",
            field="norm_before_residual",
            hint="add it: speculators trains with false unless told otherwise, vLLM assumes true",
        )
    named = layers or layer_ids(config, IDS) or default_layers(target)
    before = flag(config, "norm_before_residual", False)
    draft = count(config, "draft_vocab_size", _DRAFT)
    keys = {**config, "draft_vocab_size": draft}
    block = _block(config.get(_LAYER), len(named))
    return assemble(source, Asked(block, keys, named, before))


def write_speculators(shipment: Shipment) -> Written:
    """Everything explicit; the embeddings go along, so that its own loader needs no verifier."""
    spec = checked_eagle3(shipment)
    refuse("speculators", {"fc_bias": spec.fc_bias})
    if len(set(spec.layers)) != len(spec.layers):
        refuse("speculators", {"layers": spec.layers}, "it reads every layer once")
    if spec.target_hidden_size != spec.block.hidden_size:
        refuse("speculators", {"target_hidden_size": spec.target_hidden_size})
    layer = block_to_hf(spec.block, shipment.held.dtype)
    layer["dtype"] = layer.pop("torch_dtype")
    scaling = layer.pop("rope_scaling") or {"rope_type": "default"}
    layer["rope_parameters"] = {**scaling, "rope_theta": layer["rope_theta"]}
    layer["num_aux_hidden_states"] = len(spec.layers)
    config = {
        "architectures": ["Eagle3Speculator"],
        TYPE_KEY: "eagle3",
        "speculators_version": _VERSION,
        "speculators_config": _proposals(shipment.verifier),
        _LAYER: layer,
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": None,
        IDS: list(spec.layers),
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "embed_requires_grad": False,
    }
    return Written(config, shipment.own() | shipment.rows() | shipment.embedding())


def _block(layer: object, features: int) -> DecoderSpec:
    if not isinstance(layer, Mapping):
        raise BadFile("must be a JSON object", field=_LAYER, value=layer)
    kind = layer.get("model_type")
    if kind not in _LEFT_OUT:
        known = ", ".join(_LEFT_OUT)
        field = f"{_LAYER}.model_type"
        raise Unsupported("unknown kind of layer", field=field, value=kind, hint=f"known: {known}")
    must_be(layer, "num_aux_hidden_states", features, why="so many layers are read")
    given = {key: value for key, value in layer.items() if value is not None}
    # what speculators saves is always scored with a matrix of its own
    own = ("num_aux_hidden_states", "tie_word_embeddings", "_attn_implementation")
    return block_from_hf({**_LEFT_OUT[kind], **given}, own, tuple(_LEFT_OUT))


def _refuse_lossy(asked: object) -> None:
    """Accepting what the target would not have said is not speculation without loss."""
    if not isinstance(asked, Mapping):
        raise BadFile("must be a JSON object", field="speculators_config", value=asked)
    methods = asked.get("proposal_methods")
    if not isinstance(methods, list) or not all(isinstance(each, Mapping) for each in methods):
        field = "speculators_config.proposal_methods"
        raise BadFile("must list JSON objects", field=field, value=methods)
    for method in methods:
        refuse_unknown(method, _PROPOSAL, "speculators_config.proposal_methods.")
        must_be(method, "proposal_type", "greedy", why="other proposals are not known")
        why = "more would change what the target says"
        must_be(method, "verifier_accept_k", 1, why=why)
        must_be(method, "accept_tolerance", 0, 0.0, why=why)


def _proposals(verifier: str | None) -> dict[str, Any]:
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": _TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [greedy],
        "verifier": {"name_or_path": verifier, "architectures": []},
    }
