"""One answer under way, as the host sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from furcate.config import SamplingParams
from furcate.engine.outputs import Choice, Stats, TokenLogprob
from furcate.kv.book import Pages

__all__ = ["Ask", "Phase", "Request"]


class Phase(Enum):
    """Where an answer stands."""

    WAITING = "waiting"  # for a slot and pages
    PREFILL = "prefill"  # its prompt is being scored, chunk by chunk
    DECODE = "decode"  # it takes part in rounds
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Ask:
    """What was asked, with every open choice settled: nothing in it changes later."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    limit: int  # most tokens, prompt included
    stop_ids: tuple[int, ...]  # EOS, unless ignored, and the request's own stop tokens
    salt: str = ""  # keeps cached prompts of different owners apart


@dataclass(slots=True, eq=False)
class Request:
    """One of the `n` answers to an Ask."""

    ask: Ask
    index: int
    phase: Phase = Phase.WAITING
    slot: int = -1
    pages: Pages = field(default_factory=Pages)
    cached: int = 0  # tokens whose keys and values are in the pages
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    read: int = 0  # tokens whose keys a drafter with keys of its own has
    gains: list[float] = field(default_factory=list)  # values of the next draft's nodes, best first
    levels: int = 0  # of the draft that its next round scores; 0: there is none
    stats: Stats = field(default_factory=Stats)
    choice: Choice | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and output so far; the last one is the root of the next round."""
        return self.ask.prompt + tuple(self.output)

    @property
    def committed(self) -> int:
        """How many tokens those are."""
        return len(self.ask.prompt) + len(self.output)
