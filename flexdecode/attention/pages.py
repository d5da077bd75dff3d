"""Page tables: which pages of a pool a sequence holds, in which order. Knows no tensor of keys or values.

One PageGroup serves all layers that share a mask. Pages are counted by reference, so forked sequences share them.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import torch
from torch import Tensor

from flexdecode.attention.masks import Mask

GIVEN_BACK = -1


class OutOfPagesError(RuntimeError):
    """The pool has no page left. Nothing was changed."""


class PageGroup:
    """The pool of `pages` pages of `page` tokens for one mask."""

    def __init__(self, mask: Mask, page: int, pages: int) -> None:
        self.mask, self.page, self.pages = mask, page, pages
        # Lowest number first: a lone sequence gets consecutive pages, and its keys can be read without a copy.
        self._free = list(range(pages))
        self._references = [0] * pages
        self._tables: dict[int, list[int]] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def table(self, sequence: int) -> list[int]:
        """Page numbers by logical page; GIVEN_BACK where the mask has let go of it."""
        return list(self._tables[sequence])

    def new(self, sequence: int) -> None:
        self._tables[sequence] = []

    def need(self, sequence: int, length: int, count: int) -> int:
        """Pages that `grow` would take from the pool, a copy of a shared last page included."""
        more = -(-(length + count) // self.page) - len(self._tables[sequence])
        return more + (1 if count and self._last_is_shared(sequence, length) else 0)

    def _last_is_shared(self, sequence: int, length: int) -> bool:
        table = self._tables[sequence]
        if length % self.page == 0 or not table:
            return False
        return table[-1] != GIVEN_BACK and self._references[table[-1]] > 1

    def own_last(self, sequence: int, length: int) -> list[tuple[int, int]]:
        """Replace a shared, partly filled last page by one of the sequence's own. Returns the copies to make."""
        if not self._last_is_shared(sequence, length):
            return []
        table = self._tables[sequence]
        old, table[-1] = table[-1], self._take()
        self._drop(old)
        return [(old, table[-1])]

    def grow(self, sequence: int, length: int, count: int) -> list[int]:
        """Slots of positions [length, length + count). Pages before the mask's horizon of `length` are given back."""
        table = self._tables[sequence]
        for logical in range(min(self.mask.horizon(length) // self.page, len(table))):
            if table[logical] != GIVEN_BACK:
                self._drop(table[logical])
                table[logical] = GIVEN_BACK
        while len(table) * self.page < length + count:
            table.append(self._take())
        page = self.page
        return [table[p // page] * page + p % page for p in range(length, length + count)]

    def locate(self, sequence: int, start: int, stop: int) -> slice | Tensor:
        """Slots of positions [start, stop): a slice where they are consecutive. Raises ValueError where one is gone."""
        if stop <= start:
            return slice(0, 0)
        table, page = self._tables[sequence], self.page
        first, last = start // page, (stop - 1) // page
        pages = table[first : last + 1]
        if GIVEN_BACK in pages:
            raise ValueError(
                f"of keys {start} to {stop - 1} some were given back under {self.mask}: plan queries in the step that "
                "appends their tokens"
            )
        if pages[-1] - pages[0] == last - first and all(b - a == 1 for a, b in pairwise(pages)):
            base = (pages[0] - first) * page
            return slice(base + start, base + stop)
        slots = (torch.tensor(pages)[:, None] * page + torch.arange(page)).flatten()
        return slots[start - first * page : stop - first * page]

    def pages_between(self, sequence: int, start: int, stop: int) -> list[int]:
        """Page numbers from the page of position `start` to that of `stop` - 1."""
        return self._tables[sequence][start // self.page : -(-stop // self.page)] if stop > start else []

    def fork(self, sequence: int, twin: int) -> None:
        self._tables[twin] = list(self._tables[sequence])
        for number in self._tables[twin]:
            if number != GIVEN_BACK:
                self._references[number] += 1

    def check_truncate(self, sequence: int, length: int) -> None:
        first = self.mask.horizon(length) // self.page
        if length and GIVEN_BACK in self._tables[sequence][first : -(-length // self.page)]:
            raise ValueError(
                f"cannot truncate to {length} tokens: the window has given back keys that the next token would see"
            )

    def truncate(self, sequence: int, length: int) -> None:
        table = self._tables[sequence]
        keep = -(-length // self.page)
        for number in table[keep:]:
            if number != GIVEN_BACK:
                self._drop(number)
        del table[keep:]

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
