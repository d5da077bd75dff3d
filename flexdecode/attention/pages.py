"""Page tables: which pages of a pool a sequence holds, in which order. Knows no tensor of keys or values.

One PageGroup serves all layers that share a mask. Pages are counted by reference, so forked sequences share them.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from flexdecode.attention.masks import UNBOUNDED, Ints, Mask, Queries, Seen

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
        twin.known, twin.open = self.known, self.open
        return twin


class PageGroup:
    """The pool of `pages` pages of `page` tokens for one mask."""

    def __init__(self, mask: Mask, page: int, pages: int) -> None:
        self.mask, self.page, self.pages = mask, page, pages
        # Lowest number first: a lone sequence gets consecutive pages, and its keys can be read without a copy.
        self._free = list(range(pages))
        self._references = [0] * pages
        self._tables: dict[int, _Table] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

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

    def _last_is_shared(self, sequence: int, length: int) -> bool:
        table = self._tables[sequence]
        if length % self.page == 0 or not table.count:
            return False
        last = int(table.numbers[-1])
        return last != GIVEN_BACK and self._references[last] > 1

    def own_last(self, sequence: int, length: int) -> list[tuple[int, int]]:
        """Replace a shared, partly filled last page by one of the sequence's own. Returns the copies to make."""
        if not self._last_is_shared(sequence, length):
            return []
        numbers = self._tables[sequence].numbers
        old, new = int(numbers[-1]), self._take()
        numbers[-1] = new
        self._drop(old)
        return [(old, new)]

    def grow(self, sequence: int, length: int, count: int) -> Ints:
        """Slots of positions [length, length + count). Pages that no query from `length` on sees are given back."""
        table, page = self._tables[sequence], self.page
        self._give_back(table, length)
        while table.count * page < length + count:
            table.append(self._take())
        positions = np.arange(length, length + count)
        return table.numbers[positions // page].astype(np.int64) * page + positions % page

    def _give_back(self, table: _Table, length: int) -> None:
        whole = length // self.page
        if whole > table.known:
            held = table.known + np.flatnonzero(table.numbers[table.known : whole] != GIVEN_BACK)
            table.open, table.known = np.concatenate([table.open, held]), whole
        if not len(table.open):
            return
        seen = self._seen(table.open, length)
        for logical in table.open[~seen.some]:
            self._drop(int(table.numbers[logical]))
            table.numbers[logical] = GIVEN_BACK
            table.holes = True
        table.open = table.open[seen.some & ~seen.every]

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

    def fork(self, sequence: int, twin: int) -> None:
        self._tables[twin] = self._tables[sequence].copy()
        for number in self.table(twin):
            if number != GIVEN_BACK:
                self._references[number] += 1

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
        for number in table.numbers[keep:].tolist():
            if number != GIVEN_BACK:
                self._drop(number)
        table.count = min(table.count, keep)
        table.reopen()
        table.holes = bool((table.numbers == GIVEN_BACK).any())

    def free(self, sequence: int) -> None:
        self.truncate(sequence, 0)
        del self._tables[sequence]

    def _take(self) -> int:
        number = heapq.heappop(self._free)
        self._references[number] = 1
        return number

    def _drop(self, number: int) -> None:
        self._references[number] -= 1
        if self._references[number] == 0:
            heapq.heappush(self._free, number)
