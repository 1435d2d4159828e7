"""Reads a network's description out of a transformers config, refusing what it does not know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from furcate.errors import BadFile, Unsupported
from furcate.models.hf_rope import ROPE_KEYS, rope_from_hf
from furcate.models.spec import DecoderSpec, check_layers

__all__ = ["ARCHITECTURES", "spec_from_hf_config"]


@dataclass(frozen=True, slots=True)
class _Architecture:
    """What one architecture computes, and transformers' defaults for keys a config leaves out."""

    causal: str
    keys: frozenset[str] = frozenset()  # beside the keys that all architectures share
    rope_theta: float = 10000.0
    tied: bool = False
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qkv_bias: bool = False
    o_bias_follows: bool = True  # attention_bias speaks of the output projection too
    qk_norm: bool = False
    sliding_window: int | None = None
    window_is_optional: bool = True  # active only with use_sliding_window


_LARGEST = 2**53  # no size of a network comes near, and floats hold it exactly

_WINDOW = frozenset({"layer_types", "max_window_layers", "use_sliding_window"})
_NOPE = frozenset({"no_rope_layers", "no_rope_layer_interval"})
_BIASES = frozenset({"attention_bias", "mlp_bias"})

ARCHITECTURES: dict[str, _Architecture] = {
    "llama": _Architecture("LlamaForCausalLM", _BIASES),
    "mistral": _Architecture("MistralForCausalLM", sliding_window=4096, window_is_optional=False),
    "qwen2": _Architecture("Qwen2ForCausalLM", _WINDOW, qkv_bias=True, sliding_window=4096),
    "qwen3": _Architecture(
        "Qwen3ForCausalLM",
        _WINDOW | {"attention_bias"},
        head_dim=128,
        qk_norm=True,
        sliding_window=4096,
    ),
    "smollm3": _Architecture(
        "SmolLM3ForCausalLM", _WINDOW | _NOPE | _BIASES, rope_theta=2000000.0, tied=True
    ),
}

_SHARED = ROPE_KEYS | {
    "architectures",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "sliding_window",
    "tie_word_embeddings",
    "vocab_size",
}

# metadata, training, and generation defaults: none of it changes a forward pass
_HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path attention_dropout
    attn_implementation bad_words_ids begin_suppress_tokens bos_token_id decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    id2label initializer_range is_decoder is_llama_config label2id length_penalty max_length
    min_length model_name no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class
    top_k top_p torch_dtype torchscript transformers.js_config transformers_version typical_p
    unk_token_id unsloth_fixed unsloth_version use_cache
    """.split()
)

# known keys whose other values would change the computation
_ONLY: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False, None),
    "chunk_size_feed_forward": (0, None),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False, None),
    "hidden_act": ("silu",),
    "pruned_heads": ({}, None),
    "rope_interleaved": (False, None),
    "tie_encoder_decoder": (False, None),
    "use_bfloat16": (False, None),
    "use_mrope": (False, None),
}


def spec_from_hf_config(config: Mapping[str, Any]) -> DecoderSpec:
    """The network a config.json describes, in the style of transformers 4 or 5.

    Raises Unsupported for an architecture, a key or a value that furcate does not compute, BadFile
    for values that are missing, of the wrong type, or do not fit together.
    """
    known = _architecture(config)
    _refuse_unknown(config, known)
    _refuse_windows(config, known)
    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    layers = check_layers("num_hidden_layers", _integer(config, "num_hidden_layers"))
    attention_bias = _flag(config, "attention_bias", False)
    return DecoderSpec(
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_integer(config, "num_key_value_heads", heads),
        head_dim=_head_dim(config, known),
        rms_norm_eps=_number(config, "rms_norm_eps"),
        max_position=_integer(config, "max_position_embeddings"),
        rope=rope_from_hf(config, default_theta=known.rope_theta),
        rope_layers=_rope_layers(config, layers),
        tied_embeddings=_flag(config, "tie_word_embeddings", known.tied),
        qkv_bias=known.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=_flag(config, "mlp_bias", False),
        qk_norm=known.qk_norm,
    )


def _architecture(config: Mapping[str, Any]) -> _Architecture:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise Unsupported(
            "unknown architecture",
            field="model_type",
            value=kind,
            hint=f"known: {', '.join(ARCHITECTURES)}",
        )
    known = ARCHITECTURES[kind]
    classes = config.get("architectures")
    if classes and classes != [known.causal]:
        raise Unsupported(f"must be {known.causal}", field="architectures", value=classes)
    return known


def _refuse_unknown(config: Mapping[str, Any], known: _Architecture) -> None:
    if config.get("quantization_config"):
        raise Unsupported(
            "quantised safetensors are not read",
            field="quantization_config",
            value=config["quantization_config"],
            hint="use the unquantised checkpoint or a GGUF file",
        )
    allowed = _SHARED | _HARMLESS | known.keys | {"quantization_config"}
    for key, value in config.items():
        if key in _ONLY:
            _check_only(key, value)
        elif key not in allowed:
            raise Unsupported(
                f"unknown for {config['model_type']}, and it might change the computation",
                field=key,
                value=value,
                hint="if it does not, remove it from config.json",
            )


def _check_only(key: str, value: object) -> None:
    if value not in _ONLY[key]:
        raise Unsupported(f"must be {_ONLY[key][0]!r}", field=key, value=value)


def _refuse_windows(config: Mapping[str, Any], known: _Architecture) -> None:
    kinds = config.get("layer_types")
    if kinds is not None and not _is_list_of(str, kinds):
        raise BadFile("must be a list of names", field="layer_types", value=kinds)
    if any(kind != "full_attention" for kind in kinds or ()):
        raise Unsupported("all layers must be full_attention", field="layer_types", value=kinds)
    if known.window_is_optional and "use_sliding_window" in known.keys:
        first = _integer(config, "max_window_layers", 0)
        windowed = _flag(config, "use_sliding_window", False)
        if not windowed or first >= _integer(config, "num_hidden_layers"):
            return
    if config.get("sliding_window", known.sliding_window) is None:
        return
    window = _integer(config, "sliding_window", known.sliding_window)
    if window < _integer(config, "max_position_embeddings"):
        raise Unsupported(
            "sliding window attention is not computed",
            field="sliding_window",
            value=window,
            hint="use a checkpoint whose sliding_window is null",
        )


def _head_dim(config: Mapping[str, Any], known: _Architecture) -> int:
    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    if config.get("head_dim") is not None or known.head_dim is not None:
        return _integer(config, "head_dim", known.head_dim)
    if heads < 1 or hidden % heads:
        raise BadFile(f"must divide {hidden}", field="num_attention_heads", value=heads)
    return hidden // heads


def _rope_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    if config["model_type"] != "smollm3":
        return (True,) * layers
    given = config.get("no_rope_layers")
    if given is None:
        every = max(1, _integer(config, "no_rope_layer_interval", 4))
        return tuple((index + 1) % every != 0 for index in range(layers))
    if not _is_list_of(int, given) or len(given) < layers or set(given) - {0, 1}:
        raise BadFile(
            f"must list 0 or 1 for {layers} layers (1: the layer sees positions)",
            field="no_rope_layers",
            value=given,
        )
    return tuple(bool(flag) for flag in given[:layers])


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _given(config, key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadFile("must be a whole number", field=key, value=value)
    if abs(value) > _LARGEST:
        raise BadFile(f"must be at most {_LARGEST}", field=key, value=value)
    return value


def _number(config: Mapping[str, Any], key: str) -> float:
    value = _given(config, key, None)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadFile("must be a number", field=key, value=value)
    if not abs(value) <= _LARGEST:  # NaN too, which Python reads where JSON has no such word
        raise BadFile("must be a finite number", field=key, value=value)
    return float(value)


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = _given(config, key, default)
    if not isinstance(value, bool):
        raise BadFile("must be true or false", field=key, value=value)
    return value


def _given(config: Mapping[str, Any], key: str, default: object) -> object:
    """The value, or the default where it is absent or null."""
    value = config.get(key)
    if value is None and default is None:
        raise BadFile("is missing", field=key, hint="config.json is incomplete")
    return default if value is None else value
