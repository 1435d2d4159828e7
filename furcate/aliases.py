"""Drafting options under the names of vLLM and SGLang, turned into furcate's or refused by name.

Two counts differ between the dialects: vLLM's `num_speculative_tokens` leaves the root out, as
furcate does; SGLang's `--speculative-num-draft-tokens` counts it in. vLLM drafts one token a level:
for a head its count is the depth, and how many nodes each level has is furcate's to choose. And
where vLLM is given one of `prompt_lookup_max` and `prompt_lookup_min`, the other is the same; so it
is under that alias, while furcate's own flags keep their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from furcate.config import DraftOptions
from furcate.errors import BadRequest, Unsupported

__all__ = ["SGLANG_SWITCHES", "Drafting", "from_sglang", "from_vllm"]

_MODEL = "model"  # a drafter of this kind is whatever the draft model's name stands for
_ACCEPTED = {"eagle1": ("eagle1", "mtp")}  # SGLang runs MTP modules under EAGLE too
SGLANG_SWITCHES = (
    "speculative_adaptive",
    "speculative_disable_batch_size_limit",
    "speculative_use_block_verification",
    "speculative_use_rejection_sampling",
)


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who drafts, and the options that were named; the rest keep furcate's defaults.

    `drafter` is None where the other engine's options name none. `kind` is what the method says of
    a draft model: "model", or the kind of a head; None where no method is named.
    """

    drafter: str | None
    options: Mapping[str, Any]
    kind: str | None = None

    def draft_options(self) -> DraftOptions:
        """The same as the record that the engine takes."""
        return DraftOptions(**self.options)

    def who(self) -> dict[str, str]:
        """Method and draft model as vLLM's `--speculative-config` names them."""
        kind = "ngram" if self.drafter == "ngram" else self.kind
        model = None if self.drafter == kind else self.drafter
        named = {"method": _in_vllm(kind), "model": model}
        return {key: word for key, word in named.items() if word is not None}

    def check_kind(self, found: str) -> None:
        """Hold the method that was named against the kind of the drafter that was found.

        Raises:
            BadRequest: they contradict each other.
        """
        if self.kind is None or found in ("off", *_ACCEPTED.get(self.kind, (self.kind,))):
            return
        what = f"{self.drafter} is of the kind {found}"
        hint = f"name the method {_in_vllm(found)!r}, or leave it out"
        raise BadRequest(what, field="method", value=_in_vllm(self.kind), hint=hint)


@dataclass(frozen=True, slots=True)
class _Dialect:
    """How one engine speaks. Every key of it stands in exactly one of the tables."""

    title: str
    method: str  # the key that names the method
    models: tuple[str, ...]  # the keys that name a draft model
    drafters: Mapping[str, str]  # method -> the kind of drafter in furcate's words
    elsewhere: tuple[str, ...]  # methods that furcate does not have
    options: Mapping[str, tuple[str, ...]]  # key -> furcate's options of the same meaning
    of_heads: Mapping[str, tuple[str, ...]]  # where a key means something else for heads
    lookup_only: tuple[str, ...]  # keys that mean nothing unless n-grams draft
    harmless: Mapping[str, tuple[object, ...]]  # key -> the values that ask for what is done anyway
    refused: Mapping[str, str]  # key -> why
    rooted: tuple[str, ...] = ()  # counts that include the root
    switches: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    echoes: Mapping[str, str] = field(default_factory=dict)  # key -> one that follows if unnamed

    def known(self) -> list[str]:
        tables = (self.options, self.harmless, self.refused, self.switches)
        return sorted({self.method, *self.models, *(key for table in tables for key in table)})


_NGRAM = ("ngram", "[ngram]")  # a model of this name is none
_EXACT = "furcate has one rule of acceptance, and it changes no token"
_ONE_DEVICE = "furcate runs target and drafter on one device"
_AS_LOADED = "a draft model is loaded like the target, with the target's dtype"
_HEADS = ("eagle1", "eagle3", "medusa", "mtp")
_COST = "furcate picks the tree from the measured cost of a round; --nodes bounds it"
_SUFFIX = "furcate's n-grams look into the request's own text; bound them by prompt_lookup_max"

_VLLM = _Dialect(
    title="vLLM's speculative config",
    method="method",
    models=("model",),
    drafters={
        "ngram": "ngram",
        "draft_model": _MODEL,
        "eagle": "eagle1",
        "eagle3": "eagle3",
        "medusa": "medusa",
        "mtp": "mtp",
    },
    elsewhere=(
        "custom_class",
        "deepseek_mtp",
        "dflash",
        "extract_hidden_states",
        "mlp_speculator",
        "ngram_gpu",
        "suffix",
    ),
    options={
        "num_speculative_tokens": ("num_draft_tokens", "depth"),
        "prompt_lookup_max": ("prompt_lookup_max",),
        "prompt_lookup_min": ("prompt_lookup_min",),
    },
    of_heads={"num_speculative_tokens": ("depth",)},
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
        "speculative_token_tree": "--tree takes the same list of paths, as JSON",
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
    drafters={
        "NGRAM": "ngram",
        "STANDALONE": _MODEL,
        "EAGLE": "eagle1",
        "EAGLE3": "eagle3",
        "NEXTN": "mtp",
    },
    elsewhere=("DFLASH", "DSPARK"),
    options={
        "speculative_num_steps": ("depth",),
        "speculative_eagle_topk": ("topk",),
        "speculative_num_draft_tokens": ("num_draft_tokens",),
        "speculative_ngram_max_bfs_breadth": ("topk",),
        "speculative_ngram_max_match_window_size": ("prompt_lookup_max",),
        "speculative_ngram_min_match_window_size": ("prompt_lookup_min",),
    },
    of_heads={},
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
        "speculative_token_map": "a head brings its own list; --draft-vocab says how much of it",
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
    drafter, kind = _drafter(named, speech)
    _refuse_lookup_without_ngrams(named, drafter, speech)
    return Drafting(drafter, _options(named, kind, speech), kind)


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


def _drafter(named: Mapping[str, object], speech: _Dialect) -> tuple[str | None, str | None]:
    """Who drafts, and the kind that the method names; a head without a model is furcate's own."""
    models = {_model(key, named[key]) for key in speech.models if key in named}
    if len(models) > 1:
        raise BadRequest("two draft models are named", field=speech.models[0], value=sorted(models))
    model = next(iter(models), None)
    kind = _kind(named.get(speech.method), speech)
    if kind == _MODEL and model is None:
        raise BadRequest("a draft model is needed", field=speech.models[0], value=None)
    if kind == "ngram" and model not in (None, *_NGRAM):
        raise BadRequest("n-grams take no draft model", field=speech.models[0], value=model)
    if kind == "ngram" or (kind is None and model in _NGRAM):
        return "ngram", None
    return model or kind, kind


def _model(key: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadRequest("must name a draft model", field=key, value=value)
    return value


def _kind(method: object, speech: _Dialect) -> str | None:
    if method is None:
        return None
    for name, kind in speech.drafters.items():
        if str(method).lower() == name.lower():
            return kind
    here = ", ".join(speech.drafters)
    if str(method).lower() in {name.lower() for name in speech.elsewhere}:
        hint = f"of these, furcate has {here}"
        raise Unsupported("no such drafter", field=speech.method, value=method, hint=hint)
    raise BadRequest("unknown method", field=speech.method, value=method, hint=f"known: {here}")


def _refuse_lookup_without_ngrams(
    named: Mapping[str, object], drafter: str | None, speech: _Dialect
) -> None:
    for key in speech.lookup_only:
        if key in named and drafter not in (None, "ngram"):
            hint = f"leave it out with the drafter {drafter}"
            raise BadRequest("only n-grams use this", field=key, value=named[key], hint=hint)


def _options(named: Mapping[str, object], kind: str | None, speech: _Dialect) -> dict[str, Any]:
    meant = {**speech.options, **(speech.of_heads if kind in _HEADS else {})}
    options: dict[str, Any] = {}
    named_by: dict[str, str] = {}
    for key in (key for key in meant if key in named):
        count = _whole(key, named[key]) - (key in speech.rooted)
        for ours in meant[key]:
            if options.get(ours, count) != count:
                raise BadRequest("two values for one option", field=key, value=named[key])
            options[ours] = count
            named_by[ours] = key
    for key, other in speech.echoes.items():
        if key in named and other not in named:
            options[other], named_by[other] = options[key], key
    for key, settings in speech.switches.items():
        if key in named:
            asked = _truth(key, named[key])
            options.update(settings if asked else {k: not v for k, v in settings.items()})
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


def _in_vllm(kind: str | None) -> str | None:
    """What vLLM calls a kind of drafter; furcate's own word where it has none."""
    return next((theirs for theirs, ours in _VLLM.drafters.items() if ours == kind), kind)


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
