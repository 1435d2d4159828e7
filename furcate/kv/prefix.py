"""Pages of finished turns, found again by the tokens they hold.

A tree of pages: the path from the root to an entry spells the tokens whose keys and values the
pages on it hold, so an entry is valid for exactly the prompts that begin with these tokens.
"""

from __future__ import annotations

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

    def find(self, tokens: Sequence[int], salt: str = "") -> Match:
        """The longest published beginning of `tokens`; the caller holds its pages from now on."""
        self._clock += 1
        pages: list[int] = []
        matched = 0
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
                break
            pages.append(step.page)
            matched += len(rest)
            entry = step if len(rest) == self._size else None
        self._pool.hold(pages)
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
            known.used = self._clock
            entry = known

    def evict(self, wanted: int) -> int:
        """Give back up to `wanted` pages that only the index holds, oldest first; how many."""
        freed = 0
        while freed < wanted:
            leaves = [leaf for leaf in self._leaves() if self._pool.holders(leaf.page) == 1]
            if not leaves:
                return freed
            for leaf in sorted(leaves, key=lambda e: e.used)[: wanted - freed]:
                self._drop(leaf)
                freed += 1
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

    def _leaves(self) -> list[_Entry]:
        return [entry for entry in self._entries() if not entry.below]

    def _entries(self) -> list[_Entry]:
        """All entries, each after the one above it."""
        found: list[_Entry] = []
        for root in self._roots.values():
            found.extend(root.below.values())
        for entry in found:  # grows while it is walked
            found.extend(entry.below.values())
        return found


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
