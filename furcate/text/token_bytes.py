"""Which bytes of text each token stands for, so that text can be decoded piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from furcate.errors import Unsupported

__all__ = ["TokenBytes", "token_bytes_of"]

_FALLBACK = {f"<0x{value:02X}>": bytes([value]) for value in range(256)}


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The decoder of a tokenizer as a map from a token's spelling to bytes.

    The text of a sequence is the UTF-8 text of the joined bytes (what is not UTF-8 becomes U+FFFD,
    one for each maximal wrong part, as the Unicode standard recommends) less at most `strip_left`
    spaces at its very beginning.
    """

    of: Callable[[str], bytes]
    strip_left: int


def token_bytes_of(backend: tokenizers.Tokenizer) -> TokenBytes:
    """The map for this tokenizer's decoder.

    Raises:
        Unsupported: a decoder whose text is not a plain join of bytes; it is named.
    """
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenBytes(_byte_level(), 0)
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        return _byte_fallback(steps)
    raise Unsupported(
        "this decoder of tokens is not known",
        field="tokenizer.json decoder",
        value=" + ".join(kinds) or None,
        hint="known: ByteLevel, and Replace + ByteFallback + Fuse (+ Strip)",
    )


def _byte_level() -> Callable[[str], bytes]:
    table = _byte_level_alphabet()

    def spell(token: str) -> bytes:
        try:
            return bytes([table[char] for char in token])
        except KeyError:  # an added token is plain text
            return token.encode("utf-8")

    return spell


def _byte_level_alphabet() -> Mapping[str, int]:
    """GPT-2's printable spelling of bytes: itself where printable in Latin-1, else from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    shifted = {chr(0x100 + n): value for n, value in enumerate(others)}
    return {chr(value): value for value in printable} | shifted


def _byte_fallback(steps: list[dict[str, Any]]) -> TokenBytes:
    old, new = steps[0]["pattern"].get("String"), steps[0]["content"]
    none: dict[str, Any] = {"content": " ", "start": 0, "stop": 0}
    strip = steps[3] if len(steps) > 3 else none
    if not isinstance(old, str) or strip["content"] != " " or strip["stop"] != 0:
        what = "this decoder of tokens is not known"
        raise Unsupported(what, field="tokenizer.json decoder", value=steps)

    def spell(token: str) -> bytes:
        return _FALLBACK.get(token) or token.replace(old, new).encode("utf-8")

    return TokenBytes(spell, strip["start"])
