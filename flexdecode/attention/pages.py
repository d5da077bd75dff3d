"""Page tables: which pages of a pool a sequence holds, in which order. Knows no tensor of keys or values.

One PageGroup serves all layers that share a mask. Pages are counted by reference, so forked sequences share them, and
named by what they hold, so that a later sequence which begins alike can adopt them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from flexdecode.attention.masks import UNBOUNDED, Ints, Mask, Queries, Seen
from flexdecode.attention.pool import Pool

GIVEN_BACK = -1


class OutOfPagesError(RuntimeError):
    """The pool has no page left. Nothing was changed."""


class _Table:
    """Page numbers by logical page, in an array that doubles when it is full."""

    def __init__(self) -> None:
        self._room = np.empty(16, np.int32)
        self.count = 0
        self.holes = False  # whether some were given back
        self.reopen()

    def reopen(self) -> None:
        """Nothing is known of what later queries see."""
        self.asked = -1  # the length for which pages were last given back
        self.known = 0  # whole pages that were looked at
        self.open = np.empty(0, np.int64)  # of these, held ones that some later queries see and others may not

    @property
    def numbers(self) -> NDArray[np.int32]:
        return self._room[: self.count]

    def append(self, number: int) -> None:
        if self.count == len(self._room):
            self._room = np.concatenate([self._room, np.empty_like(self._room)])
        self._room[self.count] = number
        self.count += 1

    def copy(self) -> _Table:
        twin = _Table()
        twin._room, twin.count, twin.holes = self._room.copy(), self.count, self.holes
        twin.asked, twin.known, twin.open = self.asked, self.known, self.open
        return twin


class PageGroup:
    """The pool of `pages` pages of `page` tokens for one mask."""

    def __init__(self, mask: Mask, page: int, pages: int) -> None:
        self.mask, self.page, self.pages = mask, page, pages
        self.pool = Pool(pages)
        self._tables: dict[int, _Table] = {}
        self._walked, self._peaks = _Table(), [0]

    @property
    def free_pages(self) -> int:
        """Pages that sequences can take; those that are only remembered are among them."""
        return self.pool.free

    def held(self, sequence: int) -> int:
        """Pages that the sequence holds, shared ones included."""
        return int(np.count_nonzero(self._tables[sequence].numbers != GIVEN_BACK))

    def most_held(self, pages: int, step: int = 1) -> int:
        """The most pages that a sequence must hold at once on its way to `pages` of them, `step` tokens at a time."""
        more = -(-(step - 1) // self.page)
        return pages if more >= pages else min(pages, self._most_held(pages) + more)

    def _most_held(self, pages: int) -> int:
        """The same, one token at a time."""
        while len(self._peaks) <= pages:
            at = len(self._peaks) - 1  # pages that are full, one more begins
            self._let_go(self._walked, at * self.page)
            self._walked.append(0)
            self._peaks.append(max(self._peaks[-1], int(np.count_nonzero(self._walked.numbers != GIVEN_BACK))))
        return self._peaks[pages]

    def table(self, sequence: int) -> list[int]:
        """Page numbers by logical page; GIVEN_BACK where the mask has let go of it."""
        found: list[int] = self._tables[sequence].numbers.tolist()
        return found

    def numbers(self, sequence: int) -> NDArray[np.int32]:
        """`table` as it lies, int32; to be read before the sequence changes."""
        return self._tables[sequence].numbers

    def has_holes(self, sequence: int) -> bool:
        """Whether pages of the sequence were given back."""
        return self._tables[sequence].holes

    def new(self, sequence: int) -> None:
        self._tables[sequence] = _Table()

    def need(self, sequence: int, length: int, count: int) -> int:
        """Pages that `grow` would take from the pool, a copy of a shared last page included."""
        more = -(-(length + count) // self.page) - self._tables[sequence].count
        return more + (1 if count and self._last_is_shared(sequence, length) else 0)

    def room(self, sequence: int, length: int, free: int) -> int:
        """The most tokens that `free` pages allow to append."""
        pages = self._tables[sequence].count + free
        if self._last_is_shared(sequence, length):
            pages -= 1
        return pages * self.page - length

    def _last_is_shared(self, sequence: int, length: int) -> bool:
        last = self._last(sequence, length)
        return last != GIVEN_BACK and self.pool.references(last) > 1

    def _last(self, sequence: int, length: int) -> int:
        """The partly filled last page; GIVEN_BACK where there is none."""
        table = self._tables[sequence]
        return int(table.numbers[-1]) if length % self.page and table.count else GIVEN_BACK

    def own_last(self, sequence: int, length: int) -> list[tuple[int, int]]:
        """Replace a shared, partly filled last page by one of the sequence's own. Returns the copies to make."""
        old = self._last(sequence, length)
        if old == GIVEN_BACK:
            return []
        if self.pool.references(old) == 1:
            self.pool.forget(old)  # filled once, then cut: what follows may be other tokens
            return []
        new = self.pool.take()
        self._tables[sequence].numbers[-1] = new
        self.pool.drop(old)
        return [(old, new)]

    def grow(self, sequence: int, length: int, count: int) -> Ints:
        """Slots of positions [length, length + count). Pages that no query from `length` on sees are given back."""
        table, page = self._tables[sequence], self.page
        self.give_back(sequence, length)
        while table.count * page < length + count:
            table.append(self.pool.take())
        if count == 1:
            return np.array([int(table.numbers[length // page]) * page + length % page])
        positions = np.arange(length, length + count)
        return table.numbers[positions // page].astype(np.int64) * page + positions % page

    def give_back(self, sequence: int, length: int) -> None:
        """Let go of the pages that no query from `length` on sees."""
        table = self._tables[sequence]
        if table.asked != length:
            for number in self._let_go(table, length):
                self.pool.drop(number)
            table.asked = length

    def _let_go(self, table: _Table, length: int) -> list[int]:
        """Mark what no query from `length` on sees; the numbers of those pages."""
        whole = length // self.page
        if whole > table.known:
            held = table.known + np.flatnonzero(table.numbers[table.known : whole] != GIVEN_BACK)
            table.open, table.known = np.concatenate([table.open, held]), whole
        if not len(table.open):
            return []
        seen = self._seen(table.open, length)
        unseen = table.open[~seen.some]
        numbers: list[int] = table.numbers[unseen].tolist()
        if numbers:
            table.numbers[unseen] = GIVEN_BACK
            table.holes = True
        table.open = table.open[seen.some & ~seen.every]
        return numbers

    def _seen(self, logical_P: Ints, length: int) -> Seen:
        """What queries from `length` on see of these logical pages."""
        first = logical_P * self.page
        return self.mask.sees(Queries(length, UNBOUNDED), first, first + self.page)

    def slots(self, sequence: int, positions_L: Ints) -> Ints:
        """Slots of keys. Raises ValueError where one is gone."""
        numbers = self._tables[sequence].numbers[positions_L // self.page].astype(np.int64)
        if (numbers == GIVEN_BACK).any():
            raise ValueError(
                f"of keys {positions_L[0]} to {positions_L[-1]} some were given back under {self.mask}: plan queries "
                "in the step that appends their tokens"
            )
        return numbers * self.page + positions_L % self.page

    def name(self, sequence: int, logical: int, name: Hashable) -> None:
        """Let a full page of the sequence be found by what it holds."""
        number = int(self._tables[sequence].numbers[logical])
        if number != GIVEN_BACK:
            self.pool.name(number, name)

    def find(self, names: Sequence[Hashable]) -> NDArray[np.int32]:
        """The pages of these names, GIVEN_BACK where there is none."""
        found = map(self.pool.find, names)
        return np.array([GIVEN_BACK if number is None else number for number in found], np.int32)

    def usable(self, found_P: NDArray[np.int32]) -> int:
        """How many pages of a prefix, found or not, can be adopted: the most after which no query sees one that was not
        found. A page that no later query sees need not be there."""
        count = len(found_P)
        missing = np.flatnonzero(found_P == GIVEN_BACK)
        if len(missing) and bool(self._seen(missing[:1], (int(missing[0]) + 1) * self.page).every[0]):
            count = int(missing[0])  # all queries after it see it
        while len(missing := missing[missing < count]):
            lost = missing[self._seen(missing, count * self.page).some]
            if not len(lost):
                break
            count = int(lost[-1])  # what may be seen from here may be seen from further back
        return count

    def adopt(self, sequence: int, found_P: NDArray[np.int32]) -> None:
        """A new sequence that begins with pages that were found, as if it had grown so far by itself."""
        table = self._tables[sequence] = _Table()
        logical, length = np.arange(len(found_P)), len(found_P) * self.page
        seen = self._seen(logical, length)
        for number in np.where(seen.some, found_P, GIVEN_BACK).tolist():
            if number == GIVEN_BACK:
                table.holes = True
            else:
                self.pool.hold(number)
            table.append(number)
        table.known, table.asked, table.open = len(found_P), length, np.flatnonzero(seen.some & ~seen.every)

    def fork(self, sequence: int, twin: int) -> None:
        self._tables[twin] = self._tables[sequence].copy()
        for number in self.table(twin):
            if number != GIVEN_BACK:
                self.pool.hold(number)

    def check_truncate(self, sequence: int, length: int) -> None:
        numbers = self._tables[sequence].numbers[: -(-length // self.page)]
        gone = np.flatnonzero(numbers == GIVEN_BACK)
        if not len(gone):
            return
        # The next token is written into the last page, which must be there though nobody may see it.
        own_page = length % self.page > 0 and int(gone[-1]) == len(numbers) - 1
        if own_page or bool(self._seen(gone, length).some.any()):
            raise ValueError(
                f"cannot truncate to {length} tokens: pages that the next token needs were given back under "
                f"{self.mask}; start anew at 0"
            )

    def truncate(self, sequence: int, length: int) -> None:
        table = self._tables[sequence]
        keep = -(-length // self.page)
        # From the end: the beginning of a sequence is worth most to others, and is forgotten last.
        for number in table.numbers[keep:][::-1].tolist():
            if number != GIVEN_BACK:
                self.pool.drop(number)
        table.count = min(table.count, keep)
        if not 0 <= table.asked <= length:  # else the next query comes no earlier than those that were asked about
            table.reopen()
            table.holes = bool((table.numbers == GIVEN_BACK).any())

    def free(self, sequence: int) -> None:
        self.truncate(sequence, 0)
        del self._tables[sequence]
