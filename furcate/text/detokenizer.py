"""Token ids to text while they arrive, never half a character."""

from __future__ import annotations

import codecs

from furcate.text.tokenizer import Tokenizer, strip_spaces

__all__ = ["Detokenizer"]


class Detokenizer:
    """Gives out text as soon as it is certain.

    A token is bytes, and UTF-8 tells by itself where a character ends, so no window of tokens is
    decoded again: a push costs what its own bytes cost. All pieces joined, `flush` included, are
    `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_left = tokenizer.strip_left

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; often empty inside a character."""
        raw = self._tokenizer.token_bytes(token_id, skip_special=self._skip_special)
        return self._strip(self._utf8.decode(raw))

    def flush(self) -> str:
        """What is left at the end: U+FFFD where a character stayed unfinished."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, piece: str) -> str:
        if not self._strip_left:
            return piece
        kept = strip_spaces(piece, self._strip_left)
        # any text but spaces ends the beginning
        self._strip_left = 0 if kept else self._strip_left - len(piece)
        return kept
