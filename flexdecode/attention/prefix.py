"""Which prefixes of token ids are known: a full page of tokens has a name, and the name is found again by its tokens.

A name stands for all token ids up to the page's end, and for the root from which they were counted: whatever else
decides the keys. It is found page by page, by the name of the page before and the page's own tokens, which a dictionary
hashes and then compares: two prefixes of one hash stay two. A name lives as long as somebody has it: a page of a
pool, a sequence that stands there, or a name that follows it. Knows neither pages nor tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from weakref import WeakValueDictionary


class PageName:
    """`pages` full pages of tokens, the last of which it names. Equal only to itself."""

    __slots__ = ("__weakref__", "before", "pages")

    def __init__(self, before: PageName | None) -> None:
        self.before = before
        self.pages: int = 0 if before is None else before.pages + 1


class Prefixes:
    """The names of pages of `page` tokens, and where each sequence stands."""

    def __init__(self, page: int) -> None:
        self.page = page
        self._names: WeakValueDictionary[tuple[PageName | None, Hashable], PageName] = WeakValueDictionary()
        self._tips: dict[int, PageName] = {}

    def __len__(self) -> int:
        """Names that somebody has, roots included."""
        return len(self._names)

    def start(self, sequence: int, root: Hashable, names: Sequence[PageName] = ()) -> None:
        """A sequence begins, with the pages `names`."""
        self._tips[sequence] = names[-1] if names else self._named(None, root)

    def find(self, root: Hashable, token_ids: Sequence[int]) -> list[PageName]:
        """The names of the full pages at the beginning of `token_ids`, as far as they are known."""
        at, found = self._names.get((None, root)), []
        for start in range(0, len(token_ids) - self.page + 1, self.page):
            if at is not None:
                at = self._names.get((at, tuple(token_ids[start : start + self.page])))
            if at is None:
                break
            found.append(at)
        return found

    def pages(self, sequence: int) -> int:
        """How many full pages of the sequence have names."""
        return self._tips[sequence].pages

    def extend(self, sequence: int, token_ids: Sequence[int]) -> PageName:
        """The name of the sequence's next full page."""
        assert len(token_ids) == self.page, f"{len(token_ids)} tokens are no page of {self.page}"
        self._tips[sequence] = self._named(self._tips[sequence], tuple(token_ids))
        return self._tips[sequence]

    def fork(self, sequence: int, twin: int) -> None:
        self._tips[twin] = self._tips[sequence]

    def truncate(self, sequence: int, pages: int) -> None:
        """Only the first `pages` pages of the sequence are as they were."""
        tip = self._tips[sequence]
        while tip.pages > pages and tip.before is not None:
            tip = tip.before
        self._tips[sequence] = tip

    def free(self, sequence: int) -> None:
        del self._tips[sequence]

    def _named(self, before: PageName | None, key: Hashable) -> PageName:
        name = self._names.get((before, key))
        if name is None:
            name = self._names[before, key] = PageName(before)
        return name
