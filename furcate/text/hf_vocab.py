"""Reads the tokenizer of a Hugging Face model folder: tokenizer.json and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from furcate.errors import BadFile, Unsupported
from furcate.text.vocabulary import Vocabulary, begin_with

__all__ = ["load_hf_vocabulary"]

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_hf_vocabulary(folder: Path) -> Vocabulary:
    """The vocabulary in a folder as transformers writes it.

    An answer ends with any id of `eos_token_id` in generation_config.json (in config.json where
    that does not say), and with the tokenizer's own eos_token.

    Raises:
        BadFile: a file is missing, damaged or contradicts another.
        Unsupported: a setting that would be ignored.
    """
    backend = _backend(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    named = _named(folder, config)
    _check_added_tokens(backend, config, folder)
    for name, text in named.items():
        if backend.token_to_id(text) is None:
            what = f"{name} is not in the vocabulary of tokenizer.json"
            raise BadFile(what, field=str(folder), value=text)
    _set_bos(backend, config, named)
    return Vocabulary(backend, _ends(folder, backend, named), named, _template(folder, config))


def _backend(path: Path) -> tokenizers.Tokenizer:
    hint = "a folder with tokenizer.json is needed; transformers' save_pretrained writes one"
    if not path.is_file():
        raise BadFile("missing", field=str(path), hint=hint)
    text = _read_text(path)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as err:  # the tokenizers library raises nothing narrower
        raise BadFile(f"not a tokenizer: {err}", field=str(path)) from err
    backend.no_truncation()
    backend.no_padding()
    return backend


def _named(folder: Path, config: Mapping[str, Any]) -> Mapping[str, str]:
    said = {**_read_json(folder / "special_tokens_map.json"), **config}
    named = {}
    for name in _NAMED:
        value = said.get(name)
        if value is None:
            continue
        text = _content(value)
        if text is None:
            raise BadFile(f"{name} is not text", field=str(folder), value=value)
        named[name] = text
    return named


def _check_added_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path
) -> None:
    for told, token in _object(config, "added_tokens_decoder").items():
        text = _content(token)
        if text is None or str(backend.token_to_id(text)) != told:
            what = f"tokenizer_config.json gives {text!r} the id {told}, tokenizer.json does not"
            raise BadFile(what, field=str(folder / "tokenizer_config.json"), value=token)


def _set_bos(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Where tokenizer_config.json says so, it overrules the post-processor, as in transformers."""
    if config.get("add_eos_token"):
        hint = "a prompt that ends with the end token leaves nothing to generate"
        raise Unsupported("not done for prompts", field="add_eos_token", value=True, hint=hint)
    adds = config.get("add_bos_token")
    if adds is not None:
        begin_with(backend, named.get("bos_token") if adds else None)


def _ends(folder: Path, backend: tokenizers.Tokenizer, named: Mapping[str, str]) -> tuple[int, ...]:
    told = _read_json(folder / "generation_config.json").get("eos_token_id")
    if told is None:
        told = _read_json(folder / "config.json").get("eos_token_id")
    ends = [] if told is None else told if isinstance(told, list) else [told]
    if not all(isinstance(end, int) and not isinstance(end, bool) and end >= 0 for end in ends):
        raise BadFile("must be an id or a list of ids", field="eos_token_id", value=told)
    own = [backend.token_to_id(named["eos_token"])] if "eos_token" in named else []
    return tuple(dict.fromkeys([*own, *ends]))


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    told = config.get("chat_template")
    if isinstance(told, list):  # several under names; "default" is the one for plain chat
        plain = [item for item in told if isinstance(item, dict) and item.get("name") == "default"]
        told = plain[0].get("template") if plain else None
    if told is not None and not isinstance(told, str):
        raise BadFile("must be text", field="chat_template", value=told)
    return told


def _content(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key, {})
    if not isinstance(found, dict):
        raise BadFile("must be a JSON object", field=key, value=found)
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as err:
        raise BadFile("not UTF-8", field=str(path)) from err
    except OSError as err:
        raise BadFile(f"cannot be read: {err.strerror}", field=str(path)) from err


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read_text(path))
    except json.JSONDecodeError as err:
        raise BadFile(f"not JSON: {err}", field=str(path)) from err
    if not isinstance(found, dict):
        raise BadFile("not a JSON object", field=str(path))
    return found
