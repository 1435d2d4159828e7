"""Builds the tokenizer that a GGUF file describes: byte-level BPE with a named pre-tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from furcate.errors import BadFile, Unsupported
from furcate.gguf_file import GgufValue, read_gguf
from furcate.text.vocabulary import Vocabulary, begin_with

__all__ = ["load_gguf_vocabulary"]

T = TypeVar("T")

# token types of the GGUF specification
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# A GGUF file names one end token; chat models end an answer with any of these (as llama.cpp has
# it, where they are control tokens).
_END_MARKS = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    *("<|end|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<|return|>"),
)


@dataclass(frozen=True, slots=True)
class _Pre:
    """One named way to cut text before BPE: each regex cuts the pieces of the one before."""

    cuts: tuple[str, ...]
    whole_words: bool = False  # a piece that is itself a token is not merged
    bos: bool = False  # what add_bos_token is where the file does not say
    nfc: bool = False


_DIGITS_APART = _Pre((r"\p{N}", _GPT2))
_LLAMA3 = _Pre((_CL100K % 3,), whole_words=True, bos=True)
_QWEN2 = _Pre((_CL100K.replace("{1,%d}", ""),), nfc=True)
_PRE: Mapping[str, _Pre] = {
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "codeshell": _DIGITS_APART,
    "gpt-2": _Pre((_GPT2,)),
    "phi-2": _Pre((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}

_CHANGES_TEXT = (
    "tokenizer.ggml.add_space_prefix",
    "tokenizer.ggml.add_eos_token",
    "tokenizer.ggml.remove_extra_whitespaces",
    "tokenizer.ggml.precompiled_charsmap",
    "tokenizer.ggml.normalizer.lowercase",
)


@dataclass(frozen=True, slots=True)
class _Keys:
    """The file's tokenizer keys, each asked for with its type."""

    path: Path
    found: Mapping[str, GgufValue]

    def get(self, name: str, kind: Callable[[GgufValue], T | None]) -> T | None:
        key = f"tokenizer.{name}"
        if key not in self.found:
            return None
        value = kind(self.found[key])
        if value is None:
            raise BadFile(f"{key} has the wrong type", field=str(self.path))
        return value

    def need(self, name: str, kind: Callable[[GgufValue], T | None]) -> T:
        value = self.get(name, kind)
        if value is None:
            raise BadFile(f"tokenizer.{name} is missing", field=str(self.path))
        return value


def load_gguf_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary in a GGUF file.

    Raises:
        BadFile: the file is damaged or contradicts itself.
        Unsupported: a kind of tokenizer, or a pre-tokenizer, that cannot be rebuilt exactly.
    """
    keys = _Keys(path, read_gguf(path, strings=True).metadata)
    _refuse_other_kinds(keys)
    pre = _pre_tokenizer(keys)
    tokens = keys.need("ggml.tokens", _strings)
    types = keys.need("ggml.token_type", _integers)
    if len(types) != len(tokens):
        what = f"{len(tokens)} tokens, but {len(types)} token types"
        raise BadFile(what, field=str(path))
    backend = _backend(keys, pre, tokens, types)
    named = _named(keys, tokens)
    adds_bos = keys.get("ggml.add_bos_token", _flag)
    if pre.bos if adds_bos is None else adds_bos:
        if "bos_token" not in named:
            raise BadFile("add_bos_token is set, but no bos_token_id", field=str(path))
        begin_with(backend, named["bos_token"])
    return Vocabulary(
        backend, _ends(keys, tokens, types), named, keys.get("chat_template", _string)
    )


def _refuse_other_kinds(keys: _Keys) -> None:
    model = keys.need("ggml.model", _string)
    if model != "gpt2":
        raise Unsupported(
            "this kind of GGUF tokenizer cannot be rebuilt exactly",
            field="tokenizer.ggml.model",
            value=model,
            hint="use the Hugging Face folder of the model, which has tokenizer.json",
        )
    for key in _CHANGES_TEXT:
        if keys.found.get(key):
            raise Unsupported(
                "set in the file, and would be ignored", field=key, value=keys.found[key]
            )


def _pre_tokenizer(keys: _Keys) -> _Pre:
    name = keys.get("ggml.pre", _string) or ""
    if name not in _PRE:
        raise Unsupported(
            "this pre-tokenizer is not known" if name else "the file names no pre-tokenizer",
            field="tokenizer.ggml.pre",
            value=name or None,
            hint=f"known: {', '.join(_PRE)}; or use the Hugging Face folder of the model",
        )
    return _PRE[name]


def _backend(keys: _Keys, pre: _Pre, tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    unused = {i for i, kind in enumerate(types) if kind == _UNUSED}  # padding of the matrix
    vocab = {token: i for i, token in enumerate(tokens) if i not in unused}
    if len(vocab) != len(tokens) - len(unused):
        raise BadFile("a token stands twice in the vocabulary", field=str(keys.path))
    merges = [_merge(line, keys.path) for line in keys.need("ggml.merges", _strings)]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.whole_words)
    except Exception as err:  # the tokenizers library raises nothing narrower
        raise BadFile(f"its merges do not fit its tokens: {err}", field=str(keys.path)) from err
    backend = tokenizers.Tokenizer(model)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in pre.cuts]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_added(tokens, types, _CONTROL))
    backend.add_tokens(_added(tokens, types, _USER_DEFINED))
    return backend


def _added(tokens: list[str], types: list[int], kind: int) -> list[AddedToken]:
    special = kind == _CONTROL
    chosen = [token for token, of in zip(tokens, types, strict=True) if of == kind]
    return [AddedToken(token, special=special, normalized=False) for token in chosen]


def _merge(line: str, path: Path) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not space:
        raise BadFile("a merge is not two tokens", field=str(path), value=line)
    return left, right


def _named(keys: _Keys, tokens: list[str]) -> Mapping[str, str]:
    ids = {
        "bos_token": keys.get("ggml.bos_token_id", _integer),
        "eos_token": keys.get("ggml.eos_token_id", _integer),
        "unk_token": keys.get("ggml.unknown_token_id", _integer),
        "pad_token": keys.get("ggml.padding_token_id", _integer),
    }
    for name, found in ids.items():
        if found is not None and not 0 <= found < len(tokens):
            what = f"the id of {name} is outside the vocabulary of {len(tokens)} tokens"
            raise BadFile(what, field=str(keys.path), value=found)
    return {name: tokens[found] for name, found in ids.items() if found is not None}


def _ends(keys: _Keys, tokens: list[str], types: list[int]) -> tuple[int, ...]:
    told = (keys.get("ggml.eos_token_id", _integer), keys.get("ggml.eot_token_id", _integer))
    ends = [found for found in told if found is not None]
    places = {token: i for i, token in enumerate(tokens) if types[i] == _CONTROL}
    ends += [places[mark] for mark in _END_MARKS if mark in places]
    return tuple(dict.fromkeys(ends))


def _string(value: GgufValue) -> str | None:
    return value if isinstance(value, str) else None


def _integer(value: GgufValue) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _flag(value: GgufValue) -> bool | None:
    return value if isinstance(value, bool) else None


def _strings(value: GgufValue) -> list[str] | None:
    if not isinstance(value, list):
        return None
    strings = [item for item in value if isinstance(item, str)]
    return strings if len(strings) == len(value) else None


def _integers(value: GgufValue) -> list[int] | None:
    if not isinstance(value, list):
        return None
    integers = [item for item in value if isinstance(item, int)]
    return integers if len(integers) == len(value) else None
