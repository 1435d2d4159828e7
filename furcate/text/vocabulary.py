"""What a model's files say about its tokens, in one record, whatever the files' format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers.processors import TemplateProcessing

__all__ = ["Vocabulary", "begin_with"]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens, merges and rules (`backend`), and what the files name.

    `named` maps bos_token, eos_token, unk_token and pad_token to their text where the files name
    them; chat templates read these. `eos_ids` holds every id that ends an answer, the one called
    eos_token first.
    """

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]
    named: Mapping[str, str]
    template: str | None


def begin_with(backend: tokenizers.Tokenizer, bos: str | None) -> None:
    """Let `encode` put the token `bos` before the text, or nothing where it is None."""
    if bos is None:
        backend.post_processor = TemplateProcessing(single="$A", special_tokens=[])
        return
    pair = (bos, backend.token_to_id(bos))
    backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[pair])
