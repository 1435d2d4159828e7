"""Who runs now: admission, prefill in chunks, pages for a round, preemption; host state only."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from furcate.engine.request import Phase, Request
from furcate.errors import OutOfPages
from furcate.kv.book import PageBook, Pages

__all__ = ["Chunk", "Scheduler", "most_cached"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of a prompt to score next: tokens [start, end) of the request."""

    request: Request
    start: int
    end: int


class Scheduler:
    """First come, first served; the youngest gives way when pages run out.

    A request that gives way keeps its tokens and starts over from them: noise is keyed by
    position, so it goes on exactly as it would have.
    """

    def __init__(self, book: PageBook, capacity: int, prefill_chunk: int) -> None:
        self.book = book
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._slots = list(range(capacity - 1, -1, -1))
        self._chunk = prefill_chunk

    @property
    def busy(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def newcomers(self) -> bool:
        """Whether somebody may be taken in, or has a prompt that is not scored yet."""
        return bool(self.waiting and self._slots) or len(self.decoding()) < len(self.running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Take in who fits: a slot, and pages for all of its tokens."""
        admitted: list[Request] = []
        while self.waiting and self._slots and self._leader_is_done(self.waiting[0]):
            request = self.waiting[0]
            if not self._open(request):
                break
            self.waiting.popleft()
            request.slot = self._slots.pop()
            request.phase = Phase.PREFILL
            self.running.append(request)
            admitted.append(request)
        return admitted

    def next_chunk(self) -> Chunk | None:
        """The next stretch of prompt to score; the last token stays out, it is the first root."""
        for request in self.running:
            if request.phase is Phase.PREFILL:
                end = min(request.cached + self._chunk, request.committed - 1)
                return Chunk(request, request.cached, end)
        return None

    def share_prompt(self, request: Request) -> None:
        """Let the other answers to the same prompt find its pages now that they are filled."""
        if request.ask.params.n > 1 and request.index == 0:
            scored = request.tokens[: request.cached]
            self.book.prefixes.publish(scored, request.pages.numbers, request.ask.salt)

    def decoding(self) -> list[Request]:
        """Requests that take part in the next round, oldest first."""
        return [request for request in self.running if request.phase is Phase.DECODE]

    def reserve_ahead(self, rows: int, unread: int) -> bool:
        """Pages for a round behind others that may add `unread` tokens; nobody gives way for it."""
        return self._reserve_all(self.decoding(), rows, unread)

    def reserve(self, rows: int, preempted: Callable[[Request], None]) -> tuple[list[Request], int]:
        """Pages for a round of `rows` rows: (who plays, rows each of them gets).

        No other round may be in flight. Speculation gives way before a request does: rows shrink
        to one before anybody is preempted. A single request always fits, since its length is
        bounded by the pool. `preempted` hears of each who gives way while its slot is still known.
        """
        for wanted in dict.fromkeys((rows, 1)):
            players = self.decoding()
            if self._reserve_all(players, wanted):
                return players, wanted
        while not self._reserve_all(players, 1):
            youngest = self.running[-1]
            preempted(youngest)
            self.preempt(youngest)
            players = self.decoding()
        return players, 1

    def preempt(self, request: Request) -> None:
        """Put a running request back to the head of the queue; its pages are given up."""
        self._leave(request)
        request.phase = Phase.WAITING
        request.stats.preemptions += 1
        self.waiting.appendleft(request)

    def finish(self, request: Request) -> None:
        """A request is done, wherever it stands."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        else:
            self._leave(request)
        request.phase = Phase.DONE

    def _open(self, request: Request) -> bool:
        """Pages for all tokens of `request` and one round of one row, or nothing."""
        pages, cached = self.book.open(request.tokens, request.ask.salt, alone=not self.running)
        try:
            self.book.reserve(pages, cached, request.committed)
        except OutOfPages:
            self.book.close(pages)
            return False
        if self.book.available() < len(self.running):  # those who run need a page to grow into
            self.book.close(pages)
            return False
        request.pages, request.cached = pages, cached
        if not request.stats.preemptions:  # who comes back finds its own pages
            request.stats.reused_tokens += cached
        return True

    def _reserve_all(self, players: list[Request], rows: int, unread: int = 0) -> bool:
        """Reserve `rows` more positions for each, or give back what was taken."""
        try:
            for request in players:
                end = most_cached(request, unread) + rows
                self.book.reserve(request.pages, request.cached, end)
        except OutOfPages:
            for request in players:
                self.book.trim(request.pages, most_cached(request, unread) + 1)
            return False
        return True

    def _leave(self, request: Request) -> None:
        """Give back slot and pages; what is cached stays for whoever continues it."""
        cached = request.tokens[: request.cached]
        self.book.close(request.pages, cached, request.ask.salt)
        self.running.remove(request)
        self._slots.append(request.slot)
        request.pages, request.cached, request.slot = Pages(), 0, -1

    def _leader_is_done(self, request: Request) -> bool:
        """Answers 1.. of a request wait for answer 0's prefill and share its pages."""
        return not any(
            other.ask is request.ask and other.phase is Phase.PREFILL for other in self.running
        )


def most_cached(request: Request, unread: int) -> int:
    """Tokens whose keys may be cached once rounds are read that can add `unread` tokens."""
    return min(request.cached + unread, request.ask.limit - 1)
