"""A pool of pages by number: which are held and by how many, which are free, and which nobody holds but still hold
something worth finding again.

A page can be named by what it holds. A named page that nobody holds is idle: it counts as free, is found by its name,
and is taken, the least recently held first, once no other is left. Knows no sequence and no tensor.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable


class Pool:
    """`pages` pages, all of them free."""

    def __init__(self, pages: int) -> None:
        # Lowest number first: a lone sequence gets consecutive pages, and its keys can be read without a copy.
        self._free = list(range(pages))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * pages
        self._names: dict[int, Hashable] = {}
        self._pages: dict[Hashable, int] = {}

    @property
    def free(self) -> int:
        """Pages that can be taken, idle ones included."""
        return len(self._free) + len(self._idle)

    @property
    def idle(self) -> int:
        """Pages that nobody holds and that can still be found."""
        return len(self._idle)

    def references(self, page: int) -> int:
        """How many hold it."""
        return self._references[page]

    def take(self) -> int:
        """A page of one's own. What an idle one held is forgotten."""
        if self._free:
            page = heapq.heappop(self._free)
        else:
            page, _ = self._idle.popitem(last=False)
            self.forget(page)
        self._references[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Hold a page that is held by others, or idle."""
        self._idle.pop(page, None)
        self._references[page] += 1

    def drop(self, page: int) -> None:
        """Hold it no longer."""
        self._references[page] -= 1
        if self._references[page]:
            return
        if page in self._names:
            self._idle[page] = None
        else:
            heapq.heappush(self._free, page)

    def name(self, page: int, name: Hashable) -> None:
        """Let a held page be found. It stays as it is where it has a name, or another page has this one."""
        if page not in self._names and name not in self._pages:
            self._names[page] = name
            self._pages[name] = page

    def forget(self, page: int) -> None:
        """It can be found no longer: what it holds is about to change."""
        if page in self._names:
            del self._pages[self._names.pop(page)]

    def find(self, name: Hashable) -> int | None:
        """The page of this name, held or idle."""
        return self._pages.get(name)
