"""Text to token ids and back, and the name by which two vocabularies are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from furcate.errors import BadFile, BadRequest
from furcate.text.gguf_vocab import load_gguf_vocabulary
from furcate.text.hf_vocab import load_hf_vocabulary
from furcate.text.template import ChatTemplate
from furcate.text.token_bytes import token_bytes_of
from furcate.text.vocabulary import Vocabulary

__all__ = ["Tokenizer", "load_tokenizer"]


class Tokenizer:
    """One model's tokens.

    Attributes:
        vocab_size: the highest token id plus one; a model's matrix may have more rows.
        eos_ids: every id that ends an answer, the one called eos_token first.
        bos_id: the id of bos_token, None where the model has none.
        special_ids: ids that are marks, not text.
    """

    def __init__(self, vocabulary: Vocabulary, now: Callable[[], datetime]) -> None:
        self._backend = vocabulary.backend
        self._bytes = token_bytes_of(vocabulary.backend)
        self._template = (
            None
            if vocabulary.template is None
            else ChatTemplate(vocabulary.template, vocabulary.named, now)
        )
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values())
        self.eos_ids = vocabulary.eos_ids
        bos = vocabulary.named.get("bos_token")
        self.bos_id = None if bos is None else self._backend.token_to_id(bos)

    @property
    def has_template(self) -> bool:
        """True where the model comes with a chat template."""
        return self._template is not None

    @property
    def strip_left(self) -> int:
        """How many spaces at most are dropped from the very beginning of decoded text."""
        return self._bytes.strip_left

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text; with `special`, after the begin token where the model wants one.

        Marks such as `<|im_end|>` in the text become their token, as everywhere in the ecosystem,
        and as there, a byte for which the vocabulary has no token leaves none (SmolLM2 lacks six
        control characters and the unassigned planes 4 to 11 of Unicode).

        Raises:
            BadRequest: the text is not valid Unicode.
        """
        _refuse_surrogates(text)
        return list(self._backend.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of a sequence of ids; bytes that are not UTF-8 become U+FFFD."""
        joined = b"".join(self.token_bytes(i, skip_special=skip_special) for i in ids)
        return strip_spaces(joined.decode("utf-8", "replace"), self.strip_left)

    def token_bytes(self, token_id: int, *, skip_special: bool = False) -> bytes:
        """The bytes a token adds to the text; none for an id without a token."""
        if skip_special and token_id in self.special_ids:
            return b""
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._bytes.of(token)

    def token_text(self, token_id: int) -> str:
        """One token as text, marks included; half a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def chat_ids(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """The ids of a conversation under the model's own chat template.

        Raises:
            BadRequest: no template, a message that is not {role, content}, or one that the
                template refuses.
            BadFile: the template itself is broken.
        """
        if self._template is None:
            hint = "give a plain prompt, or use the instruct version of the model"
            raise BadRequest("this model has no chat template", field="messages", hint=hint)
        text = self._template.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, special=False)  # the template writes the begin token itself

    def fingerprint(self) -> str:
        """Equal for two tokenizers exactly if every id stands for the same token (sha256, hex).

        A draft model may serve a target only where the two fingerprints are equal.
        """
        digest = hashlib.sha256()
        vocab = self._backend.get_vocab(with_added_tokens=True)
        for token, token_id in sorted(vocab.items(), key=lambda entry: entry[1]):
            raw = token.encode("utf-8")
            digest.update(b"%d %d " % (token_id, len(raw)) + raw)
        return digest.hexdigest()


def load_tokenizer(path: Path, *, now: Callable[[], datetime] = datetime.now) -> Tokenizer:
    """The tokenizer of a model: a Hugging Face folder or a GGUF file.

    Args:
        now: the clock that chat templates with a date in them read.

    Raises:
        BadFile: a file is missing or damaged.
        Unsupported: a kind of tokenizer that cannot be rebuilt exactly.
    """
    if path.is_dir():
        return Tokenizer(load_hf_vocabulary(path), now)
    if not path.is_file():
        raise BadFile("no such file or folder", field="model", value=str(path))
    return Tokenizer(load_gguf_vocabulary(path), now)


def strip_spaces(text: str, most: int) -> str:
    """The text less at most `most` spaces at its beginning."""
    spaces = len(text) - len(text.lstrip(" "))
    return text[min(spaces, most) :]


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as err:
        raise BadRequest(
            f"half a surrogate pair at character {err.start}",
            field="prompt",
            value=text[err.start : err.end],
            hint="send valid Unicode text",
        ) from err
