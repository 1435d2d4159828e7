"""Tiny tokenizers for tests: a Hugging Face folder and a GGUF file with the same vocabulary."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from furcate.text.tokenizer import Tokenizer

MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOOL = "<tool>"  # an added token that is text, not a mark
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ã", "©"), ("Ġ", "Ġ")]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "bos_token": "<|im_start|>",
    "eos_token": {"content": "<|im_end|>", "special": True},
    "chat_template": TEMPLATE,
}


def tokens() -> list[str]:
    """Marks, every byte, what the merges make, and one token of plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*MARKS, *alphabet, *("".join(pair) for pair in MERGES), TOOL]


def write_folder(folder: Path, **config: object) -> Path:
    """A Hugging Face folder; keyword arguments are added to tokenizer_config.json."""
    vocab = {token: i for i, token in enumerate(tokens())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(MARKS)
    backend.add_tokens([AddedToken(TOOL, special=False, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {**CONFIG, **config})
    write_json(folder / "config.json", {"eos_token_id": 2})
    return folder


def write_fallback_folder(folder: Path) -> Path:
    """A folder with a SentencePiece-like tokenizer: metaspace, byte fallback, a stripped space."""
    plain = ["<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "é", "  "]
    vocab = {token: i for i, token in enumerate(plain)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": True})
    return folder


def write_gguf(path: Path, **changes: object) -> Path:
    """A GGUF file with a tokenizer and no tensors; `changes` replace keys, None leaves one out."""
    kinds = [3] * len(MARKS) + [1] * (len(tokens()) - len(MARKS) - 1) + [4]
    keys: dict[str, object] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens(),
        "token_type": kinds,
        "merges": [" ".join(pair) for pair in MERGES],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    } | changes
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_chat_template(TEMPLATE)
    for key, value in keys.items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def id_of(tokenizer: Tokenizer, spelling: str) -> int:
    """The id of a token by its spelling in the vocabulary."""
    found = tokenizer._backend.token_to_id(spelling)
    assert found is not None
    return int(found)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), "utf-8")


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
