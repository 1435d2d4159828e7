"""A request's pages: reserved before a pass, shared between requests, given back at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from furcate.kv.pages import PagePool
from furcate.kv.prefix import PrefixIndex

__all__ = ["PageBook", "Pages"]

SHORT = 16  # pages that are copied rather than shared, at the most
STRETCHES = 32  # what is kept for later is given up in so many parts


@dataclass(slots=True)
class Pages:
    """The pages of one request, in order of position."""

    numbers: list[int] = field(default_factory=list)


class PageBook:
    """Reserves, shares and returns pages; the only owner of the pool and of the prefix index.

    With `in_runs` the keys of a request that runs alone are read in place if its pages follow one
    another; a short beginning found from an earlier prompt is then copied rather than shared.
    """

    def __init__(
        self,
        count: int,
        page_size: int,
        copy_page: Callable[[int, int], None],
        *,
        in_runs: bool = False,
    ) -> None:
        self.page_size = page_size
        self.pool = PagePool(count)
        self.prefixes = PrefixIndex(self.pool, page_size)
        self._copy = copy_page
        self._in_runs = in_runs

    def available(self) -> int:
        """Pages free now or after giving up finished turns."""
        return self.pool.free + self.prefixes.evictable()

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def reserve(self, pages: Pages, start: int, end: int) -> None:
        """Make positions [start, end) of the request its own to write.

        Pages shared with others in that range are copied first (copy on write). Raises OutOfPages
        and changes nothing if the room is not there.
        """
        missing = max(self.pages_for(end) - len(pages.numbers), 0)
        touched = range(start // self.page_size, min(self.pages_for(end), len(pages.numbers)))
        shared = [i for i in touched if self.pool.shared(pages.numbers[i])]
        if not self._make_room(missing + len(shared)):
            # where no page is left for a copy, the index gives up its hold on the page instead:
            # a lone request would wait for ever for the turns that it continues itself
            spare = self._only_remembered([pages.numbers[i] for i in shared])
            if not self._make_room(missing + len(shared) - len(spare)):
                raise self.pool.too_few(missing + len(shared))
            self.prefixes.forget(spare)
            shared = [i for i in shared if pages.numbers[i] not in spare]
        fresh = self.pool.take(missing + len(shared))
        for i in shared:
            page = fresh.pop()
            self._copy(pages.numbers[i], page)
            self.pool.give([pages.numbers[i]])
            pages.numbers[i] = page
        pages.numbers.extend(fresh)

    def open(
        self, tokens: Sequence[int], salt: str = "", *, alone: bool = False
    ) -> tuple[Pages, int]:
        """Pages for a prompt, and how many of its tokens are cached already.

        `alone`: nobody else is at work, so the pages are worth having in a row.

        The last token is never taken from the cache: it is the root of the first round.
        """
        match = self.prefixes.find(tokens[:-1], salt, take_over=alone)
        pages = Pages(list(match.pages))
        if alone and self._in_runs and 0 < len(pages.numbers) <= SHORT:
            self._move_to_a_run(pages)
        return pages, match.tokens

    def trim(self, pages: Pages, tokens: int) -> None:
        """Give back the pages past the first `tokens` tokens."""
        keep = self.pages_for(tokens)
        self.pool.give(pages.numbers[keep:])
        del pages.numbers[keep:]

    def close(self, pages: Pages, tokens: Sequence[int] = (), salt: str = "") -> None:
        """Give all pages back; those that hold `tokens` are kept for later prompts."""
        self.prefixes.publish(tokens, pages.numbers, salt)
        self.pool.give(pages.numbers)
        pages.numbers.clear()

    def _move_to_a_run(self, pages: Pages) -> None:
        """Copy pages that the next free one does not follow to where it does."""
        old = pages.numbers
        if self.pool.next == old[-1] + 1 or not self._make_room(len(old)):
            return
        pages.numbers = self.pool.take(len(old))
        for source, target in zip(old, pages.numbers, strict=True):
            self._copy(source, target)
        self.pool.give(old)

    def _make_room(self, wanted: int) -> bool:
        """Free `wanted` pages, giving up finished turns; where there are fewer, change nothing."""
        short = wanted - self.pool.free
        if short <= 0:
            return True
        if short > self.prefixes.evictable():
            return False
        # in stretches, so that the pages that come free follow one another
        self.prefixes.evict(max(short, self.prefixes.held // STRETCHES))
        return True

    def _only_remembered(self, pages: list[int]) -> set[int]:
        """Those of a request's pages whose only other owner is the index."""
        known = self.prefixes.holding()
        return {page for page in pages if page in known and self.pool.holders(page) == 2}
