"""How much room a cache needs: the pages of one sequence, by group of layers, and how a budget of bytes is cut.

A group whose mask forgets needs room for what it still sees and for a step's new tokens, however long the sequence.
Knows no sequence and no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexdecode.attention.cache import CacheLayer, bytes_per_token, groups_of
from flexdecode.attention.pages import PageGroup

Pages = tuple[int, ...]  # by group, in the order of `groups_of`


class Sizing:
    """`step`: the most tokens of one sequence that are computed at once, None for all of a prompt."""

    def __init__(self, layers: Sequence[CacheLayer], dtype: torch.dtype, page: int, step: int | None) -> None:
        masks = groups_of(layers)
        self.page, self._step = page, step
        self._groups = [PageGroup(mask, page, 0) for mask in masks]  # only asked what a sequence would hold
        self.page_bytes = [page * sum(bytes_per_token(x, dtype) for x in layers if x.mask == mask) for mask in masks]

    def one(self, tokens: int) -> Pages:
        """Pages that one sequence takes at most on its way to `tokens` tokens."""
        pages = -(-tokens // self.page)
        return tuple(group.most_held(pages, self._step or tokens) for group in self._groups)

    def nbytes(self, pages: Pages) -> int:
        return sum(count * size for count, size in zip(pages, self.page_bytes, strict=True))

    def longest(self, budget: int, most: int) -> int:
        """The longest sequence that `budget` bytes hold, `most` tokens or whole pages; 0 where not even one fits."""
        if self.nbytes(self.one(most)) <= budget:
            return most
        low, high = 0, most // self.page  # pages that fit, and perhaps some more
        while low < high:
            middle = (low + high + 1) // 2
            if self.nbytes(self.one(middle * self.page)) <= budget:
                low = middle
            else:
                high = middle - 1
        return low * self.page

    def cut(self, budget: int, tokens: int, sequences: int, running: int, greedy: bool) -> Pages:
        """Cut `budget` bytes into pages for each group; one sequence of `tokens` tokens must fit.

        At first comes room for sequences of that length, `sequences` of them or as large a part as fits. What is left
        lets more of them, up to `running` shorter ones, have a window each, and, if `greedy`, have more tokens.
        """
        one, length = self.one(tokens), -(-tokens // self.page)
        unit = self.nbytes(one)
        assert unit <= budget, "one sequence must fit"
        part = min(budget, sequences * unit)
        pages = tuple(n * part // unit for n in one)
        room = length * part // unit  # of a group that forgets nothing
        pages = self._grow(pages, tuple(min(room, running * n) for n in one), budget)
        return self._grow(pages, tuple(running * n for n in one), budget) if greedy else pages

    def _grow(self, pages: Pages, goals: Pages, budget: int) -> Pages:
        """Bring all groups nearer to their goals by the same part of the way, as far as the budget allows."""
        missing = tuple(max(0, goal - n) for goal, n in zip(goals, pages, strict=True))
        left, cost = budget - self.nbytes(pages), self.nbytes(missing)
        return tuple(
            n + (more if cost <= left else more * left // cost) for n, more in zip(pages, missing, strict=True)
        )
