"""What a chat template writes around the turns of a conversation, found by rendering one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from furcate.errors import BadRequest, Unsupported
from furcate.text.tokenizer import Tokenizer

__all__ = ["TurnEnd", "Wrap", "rendered"]

# words that no template looks at, and that need no escape
_SYSTEM, _ASKS, _SAYS, _ASKS_ON = "sentinelsystem", "sentinelask", "sentinelsay", "sentinelmore"


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """An end token and its text."""

    id: int
    text: str


@dataclass(frozen=True, slots=True)
class Wrap:
    """The text around the turns of a conversation.

    Attributes:
        opening: what comes before the first user's turn where no system message is given; a
            default one that the template puts in is part of it.
        before_system, after_system: the same around a given one; None where the template takes no
            system message.
        to_answer: from a user's turn to the answer.
        to_user: from an answer to the next user's turn.
    """

    opening: str
    before_system: str | None
    after_system: str | None
    to_answer: str
    to_user: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Wrap:
        """The wrap that a tokenizer's chat template makes.

        Raises:
            BadRequest: there is no chat template, or it refuses a plain conversation.
            Unsupported: the template does more than wrap turns, so no turn can be left to the
                target to write.
        """
        if not tokenizer.has_template:
            hint = "use the instruct version of the model"
            what = "this model has no chat template, so it holds no conversations"
            raise BadRequest(what, field="--target", hint=hint)
        first, to_answer = _parted(rendered(tokenizer, [_user(_ASKS)]), [_ASKS])
        talk = [_user(_ASKS), _assistant(_SAYS), _user(_ASKS_ON)]
        parts = _parted(rendered(tokenizer, talk), [_ASKS, _SAYS, _ASKS_ON])
        # a template may put a space or an empty thought before answers that are already there
        if parts[0] != first or not parts[1].startswith(to_answer) or parts[3] != to_answer:
            raise _no_plain_wrap("later turns change how earlier ones are written")
        return cls(first, *_around_system(tokenizer, to_answer), to_answer, parts[2])

    def before(self, system: str | None) -> str:
        """What comes before the first user's turn, with a system message or without one."""
        if system is None:
            return self.opening
        assert self.before_system is not None and self.after_system is not None
        return self.before_system + system + self.after_system

    def turn_before(self, text: str) -> str:
        """The user's turn at the end of `text`, which runs up to an answer."""
        return text.rpartition(self._user_mark)[2].removesuffix(self.to_answer)

    def turn_end(self, tokenizer: Tokenizer) -> TurnEnd:
        """The token that ends every turn.

        Raises:
            Unsupported: turns of users and answers do not end with one and the same end token, so
                that the target cannot say that a user's turn is over.
        """
        first = tokenizer.encode(self.to_answer, special=False)[:1]
        text = tokenizer.decode(first, skip_special=False)
        both = self.to_answer.startswith(text) and self.to_user.startswith(text)
        if not first or first[0] not in tokenizer.eos_ids or not both:
            raise _no_plain_wrap("a user's turn does not end with an end token")
        return TurnEnd(first[0], text)

    @property
    def _user_mark(self) -> str:
        """What stands before each user's turn, the first and the later ones."""
        pairs = zip(reversed(self.opening), reversed(self.to_user), strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return self.to_user[len(self.to_user) - shared :] or self.to_user

    @property
    def takes_system(self) -> bool:
        """Whether system messages can be given."""
        return self.before_system is not None


def rendered(
    tokenizer: Tokenizer, talk: Sequence[Mapping[str, str]], *, to_answer: bool = True
) -> str:
    """A conversation as the template writes it, and where `to_answer`, up to the next answer.

    Raises:
        BadRequest: there is no template, or it refuses the conversation.
    """
    ids = tokenizer.chat_ids(talk, add_generation_prompt=to_answer)
    return tokenizer.decode(ids, skip_special=False)


def _around_system(tokenizer: Tokenizer, to_answer: str) -> tuple[str | None, str | None]:
    talk = [{"role": "system", "content": _SYSTEM}, _user(_ASKS)]
    try:
        before, after, end = _parted(rendered(tokenizer, talk), [_SYSTEM, _ASKS])
    except (BadRequest, Unsupported):
        return None, None
    return (before, after) if end == to_answer else (None, None)


def _parted(text: str, contents: Sequence[str]) -> list[str]:
    """What stands around the contents, which must all be there, once each, in order."""
    parts = []
    for content in contents:
        before, found, text = text.partition(content)
        if not found or content in text:
            raise _no_plain_wrap(f"it does not write a message's content once, as it is: {content}")
        parts.append(before)
    return [*parts, text]


def _no_plain_wrap(why: str) -> Unsupported:
    hint = "give conversations with --data FILE.jsonl"
    what = f"the model's chat template is no plain wrap around turns: {why}"
    return Unsupported(what, field="--target", hint=hint)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}
