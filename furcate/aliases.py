"""Drafting options under the names of vLLM and SGLang, turned into furcate's or refused by name.

Two counts differ between the dialects: vLLM's `num_speculative_tokens` leaves the root out, as
furcate does; SGLang's `--speculative-num-draft-tokens` counts it in. And where vLLM is given one of
`prompt_lookup_max` and `prompt_lookup_min`, the other is the same; so it is under that alias, while
furcate's own flags keep their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from furcate.config import DraftOptions
from furcate.errors import BadRequest, Unsupported

__all__ = ["SGLANG_SWITCHES", "Drafting", "from_sglang", "from_vllm"]

SGLANG_SWITCHES = (
    "speculative_adaptive",
    "speculative_disable_batch_size_limit",
    "speculative_use_block_verification",
    "speculative_use_rejection_sampling",
)


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who drafts, and the options that were named; the rest keep furcate's defaults.

    `drafter` is None where the other engine's options name none.
    """

    drafter: str | None
    options: Mapping[str, Any]

    def draft_options(self) -> DraftOptions:
        """The same as the record that the engine takes."""
        return DraftOptions(**self.options)


@dataclass(frozen=True, slots=True)
class _Dialect:
    """How one engine speaks. Every key of it stands in exactly one of the tables."""

    title: str
    method: str  # the key that names the method
    models: tuple[str, ...]  # the keys that name a draft model
    drafters: Mapping[str, str]  # method -> "ngram", or "model": the one that the draft model names
    elsewhere: tuple[str, ...]  # methods that furcate does not have
    options: Mapping[str, tuple[str, ...]]  # key -> furcate's options of the same meaning
    lookup_only: tuple[str, ...]  # keys that mean nothing unless n-grams draft
    harmless: Mapping[str, tuple[object, ...]]  # key -> the values that ask for what is done anyway
    refused: Mapping[str, str]  # key -> why
    rooted: tuple[str, ...] = ()  # counts that include the root
    switches: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    echoes: Mapping[str, str] = field(default_factory=dict)  # key -> one that follows if unnamed

    def known(self) -> list[str]:
        tables = (self.options, self.harmless, self.refused, self.switches)
        return sorted({self.method, *self.models, *(key for table in tables for key in table)})


_EXACT = "furcate has one rule of acceptance, and it changes no token"
_ONE_DEVICE = "furcate runs target and drafter on one device"
_AS_LOADED = "a draft model is loaded like the target, with the target's dtype"
_COST = "furcate picks the tree from the measured cost of a round; --nodes bounds it"
_SUFFIX = "furcate's n-grams look into the request's own text; bound them by prompt_lookup_max"

_VLLM = _Dialect(
    title="vLLM's speculative config",
    method="method",
    models=("model",),
    drafters={"ngram": "ngram", "draft_model": "model"},
    elsewhere=(
        "custom_class",
        "deepseek_mtp",
        "dflash",
        "eagle",
        "eagle3",
        "extract_hidden_states",
        "medusa",
        "mlp_speculator",
        "mtp",
        "ngram_gpu",
        "suffix",
    ),
    options={
        "num_speculative_tokens": ("num_draft_tokens", "depth"),
        "prompt_lookup_max": ("prompt_lookup_max",),
        "prompt_lookup_min": ("prompt_lookup_min",),
    },
    lookup_only=("prompt_lookup_max", "prompt_lookup_min"),
    echoes={
        "prompt_lookup_max": "prompt_lookup_min",
        "prompt_lookup_min": "prompt_lookup_max",
    },
    harmless={
        "draft_tensor_parallel_size": (1,),
        "rejection_sample_method": ("standard",),
        "draft_sample_method": ("greedy",),
        "parallel_drafting": (False,),
        "disable_padded_drafter_batch": (False,),
        "use_local_argmax_reduction": (False,),
        "use_heterogeneous_vocab": (False,),
    },
    refused={
        "attention_backend": _AS_LOADED,
        "code_revision": "furcate runs no code from a model's repository",
        "disable_by_batch_size": _COST,
        "disable_logprobs": "logprobs are given where a request asks for them",
        "draft_load_config": _AS_LOADED,
        "enforce_eager": "name it for the engine, not for its drafter",
        "kv_cache_dtype": _AS_LOADED,
        "max_model_len": "the drafter's context is the engine's max_context",
        "moe_backend": _AS_LOADED,
        "num_speculative_tokens_per_batch_size": _COST,
        "quantization": _AS_LOADED,
        "revision": "name a directory of the revision you mean",
        "speculative_token_tree": "furcate grows its trees; bound them by --nodes and --depth",
        "suffix_decoding_max_cached_requests": _SUFFIX,
        "suffix_decoding_max_spec_factor": _SUFFIX,
        "suffix_decoding_max_tree_depth": _SUFFIX,
        "suffix_decoding_min_token_prob": _SUFFIX,
        "synthetic_acceptance_length": _EXACT,
        "synthetic_acceptance_rates": _EXACT,
        "tensor_parallel_size": _ONE_DEVICE,
    },
)

_SGLANG = _Dialect(
    title="SGLang's speculative flags",
    method="speculative_algorithm",
    models=("speculative_draft_model_path", "speculative_draft_model"),
    drafters={"NGRAM": "ngram", "STANDALONE": "model"},
    elsewhere=("DFLASH", "DSPARK", "EAGLE", "EAGLE3", "NEXTN"),
    options={
        "speculative_num_steps": ("depth",),
        "speculative_eagle_topk": ("topk",),
        "speculative_num_draft_tokens": ("num_draft_tokens",),
        "speculative_ngram_max_bfs_breadth": ("topk",),
        "speculative_ngram_max_match_window_size": ("prompt_lookup_max",),
        "speculative_ngram_min_match_window_size": ("prompt_lookup_min",),
    },
    lookup_only=(
        "speculative_ngram_max_bfs_breadth",
        "speculative_ngram_max_match_window_size",
        "speculative_ngram_min_match_window_size",
    ),
    harmless={
        "speculative_accept_threshold_acc": (1, 1.0),
        "speculative_accept_threshold_single": (1, 1.0),
        "speculative_ngram_min_bfs_breadth": (1,),
    },
    refused={
        "speculative_adaptive_config": _COST,
        "speculative_attention_mode": "there is one way to attend to a tree here",
        "speculative_draft_attention_backend": _AS_LOADED,
        "speculative_draft_kv_cache_dtype": _AS_LOADED,
        "speculative_draft_load_format": _AS_LOADED,
        "speculative_draft_model_quantization": _AS_LOADED,
        "speculative_draft_model_revision": "name a directory of the revision you mean",
        "speculative_draft_sink_size": _AS_LOADED,
        "speculative_draft_window_size": _AS_LOADED,
        "speculative_moe_a2a_backend": _ONE_DEVICE,
        "speculative_moe_runner_backend": _AS_LOADED,
        "speculative_ngram_branch_length": "bound the depth by --speculative-num-steps",
        "speculative_ngram_capacity": _SUFFIX,
        "speculative_ngram_match_type": "furcate's n-grams are ranked by calibrated value",
        "speculative_token_map": "no drafter here has a reduced vocabulary",
        "speculative_use_block_verification": _EXACT,
        "speculative_use_rejection_sampling": _EXACT,
        "speculative_disable_batch_size_limit": _COST,
    },
    rooted=("speculative_num_draft_tokens",),
    switches={"speculative_adaptive": {"adaptive": True}},
)


def from_vllm(config: Mapping[str, object]) -> Drafting:
    """vLLM's `--speculative-config` JSON, as a mapping.

    Raises:
        BadRequest: an unknown key, or a value out of range.
        Unsupported: a key or method of vLLM's that furcate does not honour.
    """
    return _translated(config, _VLLM)


def from_sglang(flags: Mapping[str, object]) -> Drafting:
    """SGLang's `--speculative-*` flags; keys as in its ServerArgs (`speculative_num_steps`).

    Raises:
        BadRequest: an unknown flag, or a value out of range.
        Unsupported: a flag or algorithm of SGLang's that furcate does not honour.
    """
    return _translated(flags, _SGLANG)


def _translated(given: Mapping[str, object], speech: _Dialect) -> Drafting:
    _refuse_unknown(given, speech)
    named = {key: value for key, value in given.items() if value is not None}
    _refuse_unhonoured(named, speech)
    drafter = _drafter(named, speech)
    _refuse_lookup_without_ngrams(named, drafter, speech)
    return Drafting(drafter, _options(named, speech))


def _refuse_unknown(given: Mapping[str, object], speech: _Dialect) -> None:
    for key, value in given.items():
        if key not in speech.known():
            known = ", ".join(speech.known())
            what = f"not an option of {speech.title}"
            raise BadRequest(what, field=key, value=value, hint=f"known: {known}")


def _refuse_unhonoured(named: Mapping[str, object], speech: _Dialect) -> None:
    for key, value in named.items():
        if key in speech.refused:
            raise Unsupported("not honoured", field=key, value=value, hint=speech.refused[key])
        if key in speech.harmless and not _among(_plain(value), speech.harmless[key]):
            allowed = " or ".join(dict.fromkeys(str(v) for v in speech.harmless[key]))
            hint = f"only {allowed} is; {_EXACT}"
            raise Unsupported("not honoured", field=key, value=value, hint=hint)


def _drafter(named: Mapping[str, object], speech: _Dialect) -> str | None:
    models = {_model(key, named[key]) for key in speech.models if key in named}
    if len(models) > 1:
        raise BadRequest("two draft models are named", field=speech.models[0], value=sorted(models))
    model = next(iter(models), None)
    kind = _kind(named.get(speech.method), model, speech)
    if kind == "model" and model is None:
        raise BadRequest("a draft model is needed", field=speech.models[0], value=None)
    if kind == "ngram" and model not in (None, "ngram", "[ngram]"):
        raise BadRequest("n-grams take no draft model", field=speech.models[0], value=model)
    return model if kind == "model" else kind


def _model(key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadRequest("must name a draft model", field=key, value=value)
    return value


def _kind(method: object, model: str | None, speech: _Dialect) -> str | None:
    if method is None:
        return "ngram" if model in ("ngram", "[ngram]") else "model" if model else None
    for name, kind in speech.drafters.items():
        if str(method).lower() == name.lower():
            return kind
    here = " and ".join(speech.drafters)
    if str(method).lower() in {name.lower() for name in speech.elsewhere}:
        hint = f"of these, furcate has {here}"
        raise Unsupported("no such drafter", field=speech.method, value=method, hint=hint)
    raise BadRequest("unknown method", field=speech.method, value=method, hint=f"known: {here}")


def _refuse_lookup_without_ngrams(
    named: Mapping[str, object], drafter: str | None, speech: _Dialect
) -> None:
    for key in speech.lookup_only:
        if key in named and drafter not in (None, "ngram"):
            hint = f"leave it out with the draft model {drafter}"
            raise BadRequest("only n-grams use this", field=key, value=named[key], hint=hint)


def _options(named: Mapping[str, object], speech: _Dialect) -> dict[str, Any]:
    options: dict[str, Any] = {}
    named_by: dict[str, str] = {}
    for key in (key for key in speech.options if key in named):
        count = _whole(key, named[key]) - (key in speech.rooted)
        for ours in speech.options[key]:
            if options.get(ours, count) != count:
                raise BadRequest("two values for one option", field=key, value=named[key])
            options[ours] = count
            named_by[ours] = key
    for key, other in speech.echoes.items():
        if key in named and other not in named:
            options[other], named_by[other] = options[key], key
    for key, meant in speech.switches.items():
        if key in named:
            asked = _truth(key, named[key])
            options.update(meant if asked else {k: not v for k, v in meant.items()})
    _refuse_out_of_range(options, named_by, named)
    return options


def _refuse_out_of_range(
    options: Mapping[str, Any], named_by: Mapping[str, str], named: Mapping[str, object]
) -> None:
    try:
        DraftOptions(**options)
    except BadRequest as err:
        key = named_by.get(err.field or "")
        if key is None:
            raise
        raise BadRequest(err.what, field=key, value=named[key], hint=err.hint) from None


def _whole(key: str, value: object) -> int:
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, int):
        raise BadRequest("must be a whole number", field=key, value=value)
    return plain


def _truth(key: str, value: object) -> bool:
    word = value.lower() if isinstance(value, str) else value
    if isinstance(word, bool):
        return word
    if word not in ("true", "false"):
        raise BadRequest("must be true or false", field=key, value=value)
    return word == "true"


def _among(value: object, allowed: tuple[object, ...]) -> bool:
    """Membership in which true is not 1, nor false 0."""
    return any(value == one and type(value) is type(one) for one in allowed)


def _plain(value: object) -> object:
    """What a word of the command line stands for; JSON values stay as they are."""
    if not isinstance(value, str):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
