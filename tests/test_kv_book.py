"""Pages: who owns which, what is shared, what is copied, what comes back.

Every position of the modelled cache holds a canary: the owner's salt and all tokens up to it, just
as real keys depend on all tokens before them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from furcate.errors import OutOfPages
from furcate.kv.book import PageBook, Pages
from furcate.kv.pages import PagePool

Canary = tuple[str, tuple[int, ...]]


class Memory:
    """What the pages hold, canary by canary; scratch is page 0."""

    def __init__(self, count: int, page_size: int) -> None:
        self.size = page_size
        self.cells: list[Canary | None] = [None] * ((count + 1) * page_size)
        self.copies = 0

    def copy_page(self, source: int, target: int) -> None:
        old, new = source * self.size, target * self.size
        self.cells[new : new + self.size] = self.cells[old : old + self.size]
        self.copies += 1

    def cell(self, pages: Pages, position: int) -> int:
        return pages.numbers[position // self.size] * self.size + position % self.size

    def write(self, pages: Pages, text: Sequence[int], salt: str, start: int, end: int) -> None:
        for position in range(start, end):
            self.cells[self.cell(pages, position)] = (salt, tuple(text[: position + 1]))

    def wrong(self, pages: Pages, text: Sequence[int], salt: str, end: int) -> list[int]:
        """Positions below `end` that do not hold this text's own canary."""
        want = [(salt, tuple(text[: position + 1])) for position in range(end)]
        return [p for p in range(end) if self.cells[self.cell(pages, p)] != want[p]]


@dataclass(eq=False)
class Turn:
    """A request as the scheduler keeps it."""

    salt: str
    text: list[int]
    pages: Pages
    cached: int


texts = st.lists(st.integers(0, 1), min_size=1, max_size=14)
salts = st.sampled_from(["", "", "other"])


class BookMachine(RuleBasedStateMachine):
    turns = Bundle("turns")

    @initialize(
        count=st.integers(1, 12), page_size=st.sampled_from([1, 2, 3, 4]), in_runs=st.booleans()
    )
    def start(self, count: int, page_size: int, in_runs: bool) -> None:
        self.memory = Memory(count, page_size)
        self.book = PageBook(count, page_size, self.memory.copy_page, in_runs=in_runs)
        self.open: list[Turn] = []

    def reserved(self, turn: Turn, end: int) -> bool:
        """Reserve [cached, end); where there is no room, nothing may have changed."""
        before = self.seen_from_outside(turn.pages)
        try:
            self.book.reserve(turn.pages, turn.cached, end)
        except OutOfPages:
            assert self.seen_from_outside(turn.pages) == before
            return False
        touched = range(turn.cached // self.memory.size, -(-end // self.memory.size))
        assert not any(self.book.pool.shared(turn.pages.numbers[i]) for i in touched)
        return True

    def seen_from_outside(self, pages: Pages) -> tuple[object, ...]:
        pool = self.book.pool
        holders = tuple(pool.holders(page) for page in range(pool.count + 1))
        return (tuple(pages.numbers), pool.free, holders, self.book.available())

    @rule(target=turns, text=texts, salt=salts)
    def admit(self, text: list[int], salt: str) -> object:
        pages, cached = self.book.open(text, salt, alone=not self.open)
        turn = Turn(salt, text, pages, cached)
        assert cached < len(text)
        assert self.memory.wrong(pages, text, salt, cached) == []
        if not self.reserved(turn, len(text)):
            self.book.close(pages)
            return multiple()
        self.open.append(turn)
        return turn

    @rule(turn=turns, most=st.integers(1, 5))
    def prefill(self, turn: Turn, most: int) -> None:
        end = min(turn.cached + most, len(turn.text) - 1)
        self.memory.write(turn.pages, turn.text, turn.salt, turn.cached, end)
        turn.cached = max(end, turn.cached)

    @rule(turn=turns, rows=st.integers(1, 7), emitted=st.lists(st.integers(0, 1), max_size=5))
    def play(self, turn: Turn, rows: int, emitted: list[int]) -> None:
        self.prefill(turn, len(turn.text))
        emitted = emitted[:rows]
        if not self.reserved(turn, turn.cached + rows):
            self.book.trim(turn.pages, len(turn.text))
            return
        drafted = turn.text + [7] * rows
        self.memory.write(turn.pages, drafted, "draft", turn.cached, turn.cached + rows)
        root = turn.cached
        turn.text = turn.text + emitted
        turn.cached = len(turn.text) - 1
        self.memory.write(turn.pages, turn.text, turn.salt, root, turn.cached)

    @rule(turn=turns)
    def share(self, turn: Turn) -> None:
        self.prefill(turn, len(turn.text))
        scored = turn.text[: turn.cached]
        self.book.prefixes.publish(scored, turn.pages.numbers, turn.salt)

    @rule(turn=consumes(turns), keep=st.booleans())
    def close(self, turn: Turn, keep: bool) -> None:
        if turn not in self.open:
            return
        self.open.remove(turn)
        tokens = turn.text[: turn.cached] if keep else []
        self.book.close(turn.pages, tokens, turn.salt)
        assert turn.pages.numbers == []

    @rule(wanted=st.integers(1, 4))
    def evict(self, wanted: int) -> None:
        could, free = self.book.prefixes.evictable(), self.book.pool.free
        freed = self.book.prefixes.evict(wanted)
        assert freed == min(wanted, could) == self.book.pool.free - free

    @rule()
    def all_that_is_available_can_be_had_and_no_page_more(self) -> None:
        room, pages = self.book.available(), Pages()
        before = self.seen_from_outside(pages)
        with pytest.raises(OutOfPages):
            self.book.reserve(pages, 0, (room + 1) * self.memory.size)
        assert self.seen_from_outside(pages) == before
        self.book.reserve(pages, 0, room * self.memory.size)
        assert len(set(pages.numbers)) == room
        self.book.close(pages)

    @invariant()
    def every_turn_reads_its_own_tokens(self) -> None:
        for turn in getattr(self, "open", []):
            assert self.memory.wrong(turn.pages, turn.text, turn.salt, turn.cached) == []

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if not hasattr(self, "book"):
            return
        pool, prefixes = self.book.pool, self.book.prefixes
        owned = Counter(page for turn in self.open for page in turn.pages.numbers)
        holders = Counter({page: pool.holders(page) for page in range(1, pool.count + 1)})
        by_index = holders - owned
        assert not owned - holders, "nobody owns a page that he does not hold"
        assert set(by_index.values()) <= {1}, "the index holds a page once"
        assert by_index.total() == prefixes.held
        assert pool.free == pool.count - len([page for page in holders if holders[page]])
        assert pool.holders(0) == 0, "the scratch page is nobody's"

    @invariant()
    def owners_of_different_salts_never_meet(self) -> None:
        homes: dict[int, set[str]] = {}
        for turn in getattr(self, "open", []):
            for page in turn.pages.numbers:
                homes.setdefault(page, set()).add(turn.salt)
        assert all(len(salts) == 1 for salts in homes.values())

    def teardown(self) -> None:
        if not hasattr(self, "book"):
            return
        for turn in self.open:
            self.book.close(turn.pages, turn.text[: turn.cached], turn.salt)
        assert self.book.available() == self.book.pool.count
        self.book.prefixes.clear()
        assert self.book.pool.free == self.book.pool.count
        assert self.book.prefixes.held == 0


BookMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
test_the_book_keeps_every_promise = BookMachine.TestCase


def book_of(count: int, page_size: int) -> tuple[PageBook, Memory]:
    memory = Memory(count, page_size)
    return PageBook(count, page_size, memory.copy_page), memory


def remembered(book: PageBook, memory: Memory, text: Sequence[int], salt: str = "") -> list[int]:
    """Score a text and close it: its pages, kept by the index alone."""
    pages, cached = book.open([*text, 0], salt)
    book.reserve(pages, cached, len(text))
    memory.write(pages, text, salt, cached, len(text))
    numbers = list(pages.numbers)
    book.close(pages, text, salt)
    return numbers


@given(st.lists(st.tuples(texts, salts), max_size=6), texts, salts)
@settings(max_examples=150, deadline=None)
def test_the_longest_published_beginning_is_found(
    known: list[tuple[list[int], str]], text: list[int], salt: str
) -> None:
    book, memory = book_of(60, 4)
    for other, its_salt in known:
        remembered(book, memory, other, its_salt)
    mine = [other for other, its_salt in known if its_salt == salt]
    pages, cached = book.open(text, salt)
    assert cached == max((common(other, text[:-1]) for other in mine), default=0)
    assert len(pages.numbers) == book.pages_for(cached)
    assert memory.wrong(pages, text, salt, cached) == []


def common(a: Sequence[int], b: Sequence[int]) -> int:
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


def test_a_last_page_in_part_is_reused_and_copied_before_the_first_write() -> None:
    book, memory = book_of(8, 4)
    old = remembered(book, memory, [1, 2, 3, 4, 5, 6])
    pages, cached = book.open([1, 2, 3, 4, 5, 9, 9])
    assert (pages.numbers, cached, memory.copies) == (old, 5, 0)
    book.reserve(pages, cached, 7)
    assert memory.copies == 1
    assert pages.numbers[0] == old[0], "the whole page stays shared"
    assert pages.numbers[1] != old[1], "the other one is copied"
    memory.write(pages, [1, 2, 3, 4, 5, 9, 9], "", 5, 7)
    again, cached = book.open([1, 2, 3, 4, 5, 6, 7])
    assert cached == 6
    assert memory.wrong(again, [1, 2, 3, 4, 5, 6], "", 6) == []


def test_without_the_copy_a_neighbour_would_read_foreign_tokens() -> None:
    """The canaries can fail."""
    book, memory = book_of(8, 4)
    remembered(book, memory, [1, 2, 3, 4, 5, 6])
    pages, cached = book.open([1, 2, 3, 4, 5, 9, 9])
    memory.write(pages, [1, 2, 3, 4, 5, 9, 9], "", cached, 7)
    again, _ = book.open([1, 2, 3, 4, 5, 6, 7])
    assert memory.wrong(again, [1, 2, 3, 4, 5, 6], "", 6) == [5]


def test_salts_share_nothing() -> None:
    book, memory = book_of(8, 4)
    remembered(book, memory, [1, 2, 3, 4, 5], salt="a")
    for salt in ("", "b"):
        pages, cached = book.open([1, 2, 3, 4, 5], salt)
        assert (pages.numbers, cached) == ([], 0)
    assert book.open([1, 2, 3, 4, 5], "a")[1] == 4


def test_the_turn_used_longest_ago_is_forgotten_first() -> None:
    book, memory = book_of(3, 4)
    for first in (1, 2, 3):
        remembered(book, memory, [first] * 4)
    book.close(book.open([1] * 5)[0])
    book.reserve(Pages(), 0, 4)
    assert [book.open([first] * 5)[1] for first in (1, 2, 3)] == [4, 0, 4]


def test_a_request_that_finds_no_room_does_not_empty_the_index() -> None:
    book, memory = book_of(4, 4)
    remembered(book, memory, [1] * 8)
    with pytest.raises(OutOfPages, match="need 5 pages"):
        book.reserve(Pages(), 0, 20)
    assert book.open([1] * 9)[1] == 8


@given(texts, texts, st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_a_lone_request_gets_its_pages_whatever_is_remembered(
    known: list[int], text: list[int], page_size: int
) -> None:
    """The pool has just the room for it; there is none for a copy of a shared page."""
    count = max(-(-len(t) // page_size) for t in (known, text))
    book, memory = book_of(count, page_size)
    remembered(book, memory, known)
    pages, cached = book.open(text)
    book.reserve(pages, cached, len(text))
    memory.write(pages, text, "", cached, len(text))
    assert memory.wrong(pages, text, "", len(text)) == []
    book.prefixes.publish(text[:-1], pages.numbers)  # as for the other answers to a prompt
    book.reserve(pages, len(text) - 1, count * page_size)
    assert memory.wrong(pages, text, "", len(text)) == []
    book.close(pages, text)
    assert book.available() == count


def test_a_page_is_not_evictable_while_somebody_reads_one_below_it() -> None:
    """The reader scored the same beginning for himself: its first page is not the one kept."""
    book, memory = book_of(6, 4)
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    reader, cached = book.open([*text, 0])
    book.reserve(reader, cached, 9)
    memory.write(reader, text, "", 0, 8)
    first = remembered(book, memory, text[:4])
    other, _ = book.open([*text[:4], 9])  # whoever reads the kept page keeps it from a swap
    book.prefixes.publish(text, reader.numbers)
    book.close(other)
    assert book.pool.holders(first[0]) == 1
    assert (book.prefixes.held, book.prefixes.evictable()) == (2, 0)
    book.close(reader)
    assert book.prefixes.evictable() == 2


def test_of_the_same_tokens_twice_the_page_that_others_follow_is_kept() -> None:
    book, memory = book_of(6, 4)
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    longer, _ = book.open([*text, 0])
    book.reserve(longer, 0, 9)
    memory.write(longer, text, "", 0, 8)
    mine = list(longer.numbers)
    first = remembered(book, memory, text[:4])
    book.close(longer, text)
    assert book.pool.holders(first[0]) == 0
    again, cached = book.open([*text, 0])
    assert (again.numbers, cached) == (mine[:2], 8)
    assert memory.wrong(again, text, "", 8) == []


def test_a_short_shared_beginning_is_copied_where_that_keeps_pages_in_a_row() -> None:
    memory = Memory(12, 4)
    book = PageBook(12, 4, memory.copy_page, in_runs=True)
    old = remembered(book, memory, [1, 2, 3, 4, 5, 6, 7, 8])
    pages, cached = book.open([1, 2, 3, 4, 9, 9, 9, 9, 9], alone=True)
    book.reserve(pages, cached, 9)
    assert cached == 4
    assert pages.numbers == list(range(pages.numbers[0], pages.numbers[0] + 3))
    assert pages.numbers[0] not in old
    assert memory.wrong(pages, [1, 2, 3, 4], "", 4) == []
    book.close(pages)
    assert book.available() == 12


def test_pages_that_others_still_read_are_not_taken_from_them() -> None:
    book, memory = book_of(2, 4)
    remembered(book, memory, [1, 2, 3, 4, 5, 6])
    reader, _ = book.open([1, 2, 3, 4, 5, 6, 7])
    writer, cached = book.open([1, 2, 3, 4, 5, 9])
    with pytest.raises(OutOfPages):
        book.reserve(writer, cached, 6)
    assert memory.wrong(reader, [1, 2, 3, 4, 5, 6], "", 6) == []


def test_a_pool_hands_out_each_page_once() -> None:
    pool = PagePool(5)
    taken = pool.take(5)
    assert sorted(taken) == [1, 2, 3, 4, 5]
    with pytest.raises(OutOfPages) as told:
        pool.take(1)
    assert told.value.hint is not None
    pool.hold(taken[:1])
    pool.give(taken)
    assert (pool.free, pool.shared(taken[0]), pool.holders(taken[0])) == (4, False, 1)


def test_pages_that_come_back_are_handed_out_in_order() -> None:
    """Pages that follow one another are read without gathering."""
    pool = PagePool(9)
    first, second = pool.take(4), pool.take(3)
    pool.give(first)
    assert pool.take(3) == [1, 2, 3]
    pool.give(second[::-1])
    assert pool.take(6) == [4, 5, 6, 7, 8, 9]


def test_a_page_cannot_be_given_back_twice_or_shared_when_free() -> None:
    pool = PagePool(2)
    (page,) = pool.take(1)
    pool.give([page])
    with pytest.raises(AssertionError, match="twice"):
        pool.give([page])
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.hold([page])


def test_taking_too_many_takes_none() -> None:
    pool = PagePool(3)
    pool.take(1)
    with pytest.raises(OutOfPages):
        pool.take(3)
    assert pool.free == 2
