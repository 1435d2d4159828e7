"""Pages of finished turns, found again by the tokens they hold.

A tree of pages: the path from the root to an entry spells the tokens whose keys and values the
pages on it hold, so an entry is valid for exactly the prompts that begin with these tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from furcate.kv.pages import PagePool

__all__ = ["Match", "PrefixIndex"]


@dataclass(frozen=True, slots=True)
class Match:
    """Pages that hold the first `tokens` tokens of a prompt; the last one perhaps in part."""

    pages: tuple[int, ...]
    tokens: int


@dataclass(slots=True, eq=False)
class _Entry:
    tokens: tuple[int, ...]
    page: int
    above: _Entry | None
    used: int = 0
    below: dict[tuple[int, ...], _Entry] = field(default_factory=dict)


class PrefixIndex:
    """Holds pages for later prompts; gives back the least recently used ones when asked.

    Only computed and committed positions are ever published, so what is found depends on tokens
    alone and never on a request still under way. A `salt` keeps prompts of different owners apart.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool = pool
        self._size = page_size
        self._roots: dict[str, _Entry] = {}
        self._clock = 0
        self.held = 0

    def find(self, tokens: Sequence[int], salt: str = "", *, take_over: bool = False) -> Match:
        """The longest published beginning of `tokens`; the caller holds its pages from now on.

        With `take_over` a last page that only the index kept is the caller's alone.
        """
        self._clock += 1
        pages: list[int] = []
        matched = 0
        tail: _Entry | None = None
        entry = self._roots.get(salt)
        while entry is not None:
            entry.used = self._clock
            rest = tuple(tokens[matched : matched + self._size])
            step = entry.below.get(rest)
            if step is None:
                step, common = _closest(entry, rest)
                matched += common
                if step is not None:
                    step.used = self._clock
                    pages.append(step.page)
                tail = step if step is not None and common == len(step.tokens) else None
                break
            pages.append(step.page)
            matched += len(rest)
            entry = step if len(rest) == self._size else None
        self._pool.hold(pages)
        if take_over:
            self._hand_over(tail)
        return Match(tuple(pages), matched)

    def publish(self, tokens: Sequence[int], pages: Sequence[int], salt: str = "") -> None:
        """Keep `pages`, which hold the keys and values of `tokens`, for later prompts.

        The index becomes one more owner of each page that it did not know yet.
        """
        self._clock += 1
        entry = self._roots.setdefault(salt, _Entry((), 0, None))
        for start in range(0, len(tokens), self._size):
            part = tuple(tokens[start : start + self._size])
            known = entry.below.get(part)
            if known is None:
                page = pages[start // self._size]
                self._pool.hold([page])
                self.held += 1
                known = entry.below[part] = _Entry(part, page, entry)
            elif (
                known.page != (page := pages[start // self._size])
                and self._pool.holders(known.page) == 1
            ):
                # the same tokens twice: keep the page that its neighbours follow
                self._pool.give([known.page])
                self._pool.hold([page])
                known.page = page
            known.used = self._clock
            entry = known

    def evict(self, wanted: int) -> int:
        """Give back up to `wanted` pages that only the index holds, oldest first; how many."""
        leaves = [_by_age(entry) for entry in self._entries() if self._is_spare(entry)]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < wanted:
            leaf = heapq.heappop(leaves)[-1]
            above = leaf.above
            self._drop(leaf)
            freed += 1
            if above is not None and self._is_spare(above):
                heapq.heappush(leaves, _by_age(above))
        return freed

    def forget(self, pages: Collection[int]) -> None:
        """Give up these pages and all that go on from them; whoever else holds them keeps them."""
        doomed: dict[_Entry, None] = {}
        for entry in self._entries():
            if entry.page in pages or entry.above in doomed:
                doomed[entry] = None
        for entry in reversed(doomed):
            self._drop(entry)

    def holding(self) -> set[int]:
        """All pages it holds."""
        return {entry.page for entry in self._entries()}

    def clear(self) -> None:
        """Give back every page."""
        for salt in list(self._roots):
            self.drop(salt)

    def drop(self, salt: str) -> None:
        """Give back every page that is kept under this salt."""
        root = self._roots.pop(salt, None)
        dropped = [] if root is None else list(root.below.values())
        for entry in dropped:
            dropped.extend(entry.below.values())
            self._pool.give([entry.page])
            self.held -= 1

    def evictable(self) -> int:
        """Pages that eviction could free now, leaf by leaf."""
        loose: set[_Entry] = set()
        for entry in reversed(self._entries()):
            if self._pool.holders(entry.page) == 1 and loose.issuperset(entry.below.values()):
                loose.add(entry)
        return len(loose)

    def _drop(self, leaf: _Entry) -> None:
        assert leaf.above is not None
        del leaf.above.below[leaf.tokens]
        self._pool.give([leaf.page])
        self.held -= 1

    def _hand_over(self, tail: _Entry | None) -> None:
        """A last page that the index alone kept goes to the prompt that continues it.

        It will be written to at once: this way it need not be copied, and the prompt's pages go
        on following one another. The prompt publishes it again, filled further.
        """
        if tail is not None and not tail.below and self._pool.holders(tail.page) == 2:
            self._drop(tail)

    def _is_spare(self, entry: _Entry) -> bool:
        """Whether nothing goes on from the entry and nobody but the index holds its page."""
        inner = entry.above is not None
        return inner and not entry.below and self._pool.holders(entry.page) == 1

    def _entries(self) -> list[_Entry]:
        """All entries, each after the one above it."""
        found: list[_Entry] = []
        for root in self._roots.values():
            found.extend(root.below.values())
        for entry in found:  # grows while it is walked
            found.extend(entry.below.values())
        return found


def _by_age(entry: _Entry) -> tuple[int, int, _Entry]:
    """Sorts the least recently used first; pages tell entries of one age apart."""
    return entry.used, -entry.page, entry


def _closest(entry: _Entry, rest: tuple[int, ...]) -> tuple[_Entry | None, int]:
    """The page below `entry` that shares most tokens with `rest`, and how many."""
    best: _Entry | None = None
    most = 0
    for candidate in entry.below.values():
        common = _common(candidate.tokens, rest)
        if common > most:
            best, most = candidate, common
    return best, most


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
