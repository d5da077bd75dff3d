"""Sequences in a cache, in any order: what was written is read back, and what is visible is planned, by whichever way a
sequence came to hold it.

The model of the state machine is a list of token numbers for each sequence; a token's keys and values are a function
of its number, so any page read by the wrong name shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from flexdecode.attention.cache import CacheLayer, KVCache
from flexdecode.attention.masks import causal, chunked, window
from flexdecode.attention.pages import GIVEN_BACK, OutOfPagesError
from flexdecode.attention.plan import plan_attention
from tests.attention.dense import Ends, state

# Two layers to one group, one each to the others; every shape different.
LAYERS = (
    CacheLayer(2, 3, causal(), v_head_dim=2),
    CacheLayer(1, 4, causal() & window(5)),
    CacheLayer(1, 2, causal() & chunked(4)),
    CacheLayer(3, 1, causal(), v_head_dim=5),
    CacheLayer(2, 1, Ends(3, 6)),
)
# By group, the last query that sees a key.
LAST_QUERY: tuple[Callable[[int], float], ...] = (
    lambda key: math.inf,
    lambda key: key + 4,
    lambda key: key // 4 * 4 + 3,
    lambda key: math.inf if key < 3 else key + 5,
)
GROUPS = range(len(LAST_QUERY))


def content(tokens: list[int], layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values [T, C, D] of tokens in one layer: every element a number of its own."""
    shape = LAYERS[layer]
    numbers = torch.tensor(tokens, dtype=torch.float32)[:, None, None] * 64

    def fill(dim: int, start: int) -> Tensor:
        return numbers + (torch.arange(shape.kv_heads * dim) + start).view(shape.kv_heads, dim)

    return fill(shape.head_dim, layer), fill(shape.v_head_dim or shape.head_dim, 30 + layer)


class CacheMachine(RuleBasedStateMachine):
    """new, append, fork, truncate, free, remember and adopt in any order, against plain lists."""

    @initialize(page=st.sampled_from([1, 3, 16, 64]), pages=st.integers(2, 24))
    def start(self, page: int, pages: int) -> None:
        self.cache = KVCache(LAYERS, page * pages - page // 2, page=page, dtype=torch.float32)
        self.page, self.pages = page, pages
        for layer in range(len(LAYERS)):
            kv = self.cache.kv(layer)
            kv.k_CSD.fill_(math.nan)
            kv.v_CSD.fill_(math.nan)
        self.tokens: dict[int, list[int]] = {}
        self.past: list[list[int]] = []  # what sequences held when their pages were told
        self.gone: dict[int, list[set[int]]] = {}  # by sequence and group, the pages that were given back
        self.count = 0

    def some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.tokens)))

    @rule()
    def new(self) -> None:
        sequence = self.cache.new()
        assert sequence not in self.tokens
        self.tokens[sequence] = []
        self.gone[sequence] = [set() for _ in GROUPS]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=1, max_size=3, unique=True))
        counts = [data.draw(st.integers(0, 2 * self.page + 1)) for _ in chosen]
        before = state(self.cache)
        needs = [sum(self.need(g, s, n) for s, n in zip(chosen, counts, strict=True)) for g in GROUPS]
        try:
            slots = self.cache.append(chosen, counts)
        except OutOfPagesError:
            assert state(self.cache) == before
            assert any(need > g.free_pages for need, g in zip(needs, self.cache.groups, strict=True))
            return
        fresh = list(range(self.count, self.count + sum(counts)))
        self.count += sum(counts)
        for layer in range(len(LAYERS)):
            self.cache.write(layer, slots, *content(fresh, layer))
        for sequence, n in zip(chosen, counts, strict=True):
            length = len(self.tokens[sequence])
            for gone, last in zip(self.gone[sequence], LAST_QUERY, strict=True):
                gone |= {p for p in range(length // self.page) if all(last(key) < length for key in self.keys(p))}
            self.tokens[sequence] += fresh[:n]
            fresh = fresh[n:]

    def keys(self, page: int) -> range:
        return range(page * self.page, (page + 1) * self.page)

    def need(self, group: int, sequence: int, count: int) -> int:
        """Pages for `count` more tokens: new ones, and a copy where the last one is shared and partly filled."""
        length, table = len(self.tokens[sequence]), self.cache.groups[group].table(sequence)
        more = math.ceil((length + count) / self.page) - math.ceil(length / self.page)
        holders = sum(table[-1:] == self.cache.groups[group].table(s)[len(table) - 1 :][:1] for s in self.tokens)
        return more + (1 if count and length % self.page and holders > 1 else 0)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def remember(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        tokens, page = self.tokens[sequence], self.page
        for start in range(self.cache.remembered(sequence), len(tokens) - page + 1, page):
            self.cache.remember(sequence, tokens[start : start + page])
        self.past.append(list(tokens))

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        tokens = data.draw(st.sampled_from(self.past))
        tokens = tokens[: data.draw(st.integers(0, len(tokens)))]
        free = [g.free_pages for g in self.cache.groups]
        sequence = self.cache.adopt(tokens)
        assert sequence not in self.tokens
        length = self.cache.length(sequence)
        assert length % self.page == 0
        assert all(a >= g.free_pages for a, g in zip(free, self.cache.groups, strict=True))
        self.tokens[sequence] = tokens[:length]
        pages = range(length // self.page)
        self.gone[sequence] = [
            {p for p in pages if all(last(key) < length for key in self.keys(p))} for last in LAST_QUERY
        ]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        free = [g.free_pages for g in self.cache.groups]
        twin = self.cache.fork(sequence)
        assert twin not in self.tokens
        assert [g.free_pages for g in self.cache.groups] == free
        self.tokens[twin] = list(self.tokens[sequence])
        self.gone[twin] = [set(gone) for gone in self.gone[sequence]]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        length = data.draw(st.integers(0, len(self.tokens[sequence])))
        pages = math.ceil(length / self.page)
        left = [{p for p in gone if p < pages} for gone in self.gone[sequence]]
        lost = any(
            last(key) >= length
            for gone, last in zip(left, LAST_QUERY, strict=True)
            for page in gone
            for key in self.keys(page)
        )
        before = state(self.cache)
        if lost:
            with pytest.raises(ValueError, match=f"cannot truncate to {length} tokens"):
                self.cache.truncate(sequence, length)
            assert state(self.cache) == before
            return
        self.cache.truncate(sequence, length)
        del self.tokens[sequence][length:]
        self.gone[sequence] = left

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        self.cache.free(sequence)
        del self.tokens[sequence], self.gone[sequence]

    @invariant()
    def lengths_agree(self) -> None:
        if hasattr(self, "cache"):
            assert self.cache.lengths == {s: len(t) for s, t in self.tokens.items()}

    @invariant()
    def all_that_is_held_reads_back(self) -> None:
        if not hasattr(self, "cache"):
            return
        for sequence, tokens in self.tokens.items():
            for layer in range(len(LAYERS)):
                group = self.cache.group_of[layer]
                keys = [key for key in range(len(tokens)) if key // self.page not in self.gone[sequence][group]]
                slots = self.cache.groups[group].slots(sequence, np.array(keys, np.int64))
                wanted = content([tokens[key] for key in keys], layer)
                for got, x_TCD in zip(self.cache.kv(layer).read(slots, torch.float32), wanted, strict=True):
                    assert torch.equal(got, x_TCD.transpose(0, 1)), f"sequence {sequence}, layer {layer}"

    @invariant()
    def what_is_settled_changes_no_plan(self) -> None:
        """Plans are made on the way, so that what they settle is carried through forks and cuts."""
        if not hasattr(self, "cache"):
            return
        for sequence, tokens in self.tokens.items():
            for group, gone, last in zip(self.cache.groups, self.gone[sequence], LAST_QUERY, strict=True):
                if not tokens:
                    continue
                wanted = [key for key in range(len(tokens)) if last(key) >= len(tokens) - 1]
                if any(key // self.page in gone for key in wanted):  # an append of nothing has moved on
                    with pytest.raises(ValueError, match="given back"):
                        plan_attention(self.cache, [sequence], [1], group.mask)
                    continue
                (tile,) = plan_attention(self.cache, [sequence], [1], group.mask).tiles
                keys, seen = tile.keys_L(), tile.visible_RL()
                assert (keys if seen is None else keys[seen[0].numpy()]).tolist() == wanted

    @invariant()
    def every_page_is_held_or_free(self) -> None:
        if not hasattr(self, "cache"):
            return
        for i, group in enumerate(self.cache.groups):
            held = [n for s in self.tokens for n in group.table(s) if n != GIVEN_BACK]
            free = [*group.pool._free, *group.pool._idle]
            assert sorted({*held, *free}) == list(range(self.pages))
            assert len(free) == len({*free} - {*held})
            assert [held.count(n) for n in range(self.pages)] == group.pool._references
            for s in self.tokens:
                assert {p for p, number in enumerate(group.table(s)) if number == GIVEN_BACK} == self.gone[s][i]
                assert group.has_holes(s) == bool(self.gone[s][i])

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for sequence in self.tokens:
                self.cache.free(sequence)
            assert [g.free_pages for g in self.cache.groups] == [self.pages] * len(GROUPS)


CacheMachine.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
TestCacheMachine = CacheMachine.TestCase
