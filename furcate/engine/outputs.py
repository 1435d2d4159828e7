"""What the engine gives back: outputs, pieces of a stream, logprobs, statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Choice", "Output", "Piece", "Stats", "TokenLogprob"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural) of an emitted token, and of the likeliest ones at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Stats:
    """What a request's rounds did. A round's bonus token counts as a token, not as accepted.

    `offered_by_depth[d]` counts rounds in which the accepted path of length d had a drafted child
    to try, `accepted_by_depth[d]` those in which the child was the target's own choice. `levels`
    adds up those of the drafts that were scored.
    """

    rounds: int = 0
    tokens: int = 0
    levels: int = 0
    drafted: int = 0
    accepted: int = 0
    off_likeliest_path: int = 0  # rounds whose accepted path of 3 or more was not the likeliest
    offered_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    preemptions: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens emitted per target pass, bonus included."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def mean_levels(self) -> float:
        """Levels of the draft that a round scored, in the mean; a round without one counts as 0."""
        return self.levels / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding, prefill excluded."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def conditional_acceptance_by_depth(self) -> list[float]:
        """Share accepted of the rounds that offered a child at depth d + 1 of the path."""
        return [a / o for a, o in zip(self.accepted_by_depth, self.offered_by_depth, strict=True)]

    @property
    def marginal_acceptance_by_depth(self) -> list[float]:
        """Share of all rounds whose accepted path reached depth d + 1."""
        return [a / self.rounds for a in self.accepted_by_depth]

    def saw(self, accepted: int, offered_more: bool) -> None:
        """Note one round's walk: `accepted` levels, and whether a further child was offered."""
        reached = accepted + offered_more
        while len(self.offered_by_depth) < reached:
            self.offered_by_depth.append(0)
            self.accepted_by_depth.append(0)
        for depth in range(reached):
            self.offered_by_depth[depth] += 1
            self.accepted_by_depth[depth] += depth < accepted

    def __add__(self, other: Stats) -> Stats:
        """Both together; times add up."""
        total = Stats()
        for name in _COUNTS:
            setattr(total, name, getattr(self, name) + getattr(other, name))
        total.offered_by_depth = _added(self.offered_by_depth, other.offered_by_depth)
        total.accepted_by_depth = _added(self.accepted_by_depth, other.accepted_by_depth)
        return total


_COUNTS = (
    "rounds",
    "tokens",
    "levels",
    "drafted",
    "accepted",
    "off_likeliest_path",
    "prompt_tokens",
    "reused_tokens",
    "preemptions",
    "prefill_seconds",
    "decode_seconds",
)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a request's `n` answers.

    `finish_reason` is "stop", "length", "abort" or "error"; `stop_reason` the stop string or stop
    token id that ended it, None at EOS; `error` says what went wrong with this answer alone.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprob, ...] | None
    stats: Stats
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """An answer, or `n` of them; `text`, `token_ids` and the rest speak of the first."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    seed: int
    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """What ended the first choice, where it was a stop string or stop token id."""
        return self.choices[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Logprobs of the first choice, if asked for."""
        return self.choices[0].logprobs

    @property
    def stats(self) -> Stats:
        """Statistics of the first choice."""
        return self.choices[0].stats


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a stream: text that is now certain, the tokens since the last piece."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    choice: Choice | None = None  # with the last piece: the whole answer


def _added(a: list[int], b: list[int]) -> list[int]:
    width = max(len(a), len(b))
    padded = [x + [0] * (width - len(x)) for x in (a, b)]
    return [x + y for x, y in zip(*padded, strict=True)]
