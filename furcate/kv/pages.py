"""Who owns which page: a pool of pages with reference counts; page 0 is scratch and nobody's."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from furcate.errors import OutOfPages

__all__ = ["PagePool"]


class PagePool:
    """Pages 1..count; each is free or held, possibly by several owners.

    Pure host state: it hands out numbers and never touches memory.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(1, count + 1))  # a heap
        self._holders = [0] * (count + 1)

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def next(self) -> int | None:
        """The page that would be taken first."""
        return self._free[0] if self._free else None

    def take(self, wanted: int) -> list[int]:
        """The `wanted` lowest free pages in order, each held once.

        Lowest first, since pages that follow one another are read without gathering. Raises
        OutOfPages and takes none if there are fewer.
        """
        if wanted > len(self._free):
            raise self.too_few(wanted)
        taken = [heapq.heappop(self._free) for _ in range(wanted)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def too_few(self, wanted: int) -> OutOfPages:
        """The error that says how many pages were needed and how many are free."""
        return OutOfPages(
            f"need {wanted} pages, {len(self._free)} of {self.count} are free",
            hint="wait for a request to finish, or raise kv_tokens",
        )

    def hold(self, pages: Iterable[int]) -> None:
        """One more owner for each page."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} is free and cannot be shared"
            self._holders[page] += 1

    def give(self, pages: Iterable[int]) -> None:
        """One owner fewer for each page; the last one frees it."""
        for page in pages:
            assert self._holders[page] > 0, f"page {page} was given back twice"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                heapq.heappush(self._free, page)

    def shared(self, page: int) -> bool:
        """Whether more than one owner holds the page, so that writing needs a copy first."""
        return self._holders[page] > 1

    def holders(self, page: int) -> int:
        """How many owners hold the page."""
        return self._holders[page]
