"""What a later sequence finds in a cache: the longest beginning of which nothing is missing that a later query may see.

A token's keys and values are a function of its number, so a page found under the wrong name shows.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexdecode.attention.cache import CacheLayer, KVCache
from flexdecode.attention.masks import Mask, block_diagonal, causal, chunked, prefix_lm, sinks, window
from flexdecode.attention.pages import GIVEN_BACK, PageGroup
from tests.attention.dense import Ends, held

MASKS = {
    "causal": causal(),
    "window": causal() & window(5),
    "chunked": causal() & chunked(6),
    "ends": causal() & (window(4) | sinks(3)),
    "plain": causal() & Ends(3, 6),
}


def cache_of(*names: str, page: int = 2, pages: int = 20) -> KVCache:
    layers = [CacheLayer(1, 4, MASKS[name]) for name in names]
    return KVCache(layers, pages * page, page=page, dtype=torch.float32)


def grow(cache: KVCache, sequence: int, tokens: list[int]) -> None:
    """Append the tokens that the sequence does not hold yet, one a step, and tell those of full pages."""
    for at in range(cache.length(sequence), len(tokens)):
        slots = cache.append([sequence], [1])
        for layer in range(len(cache.layers)):
            cache.write(layer, slots, *[torch.full((1, 1, 4), tokens[at] + 1000.0 * layer)] * 2)
        remember(cache, sequence, tokens)


def remember(cache: KVCache, sequence: int, tokens: list[int]) -> None:
    for start in range(cache.remembered(sequence), cache.length(sequence) - cache.page + 1, cache.page):
        cache.remember(sequence, tokens[start : start + cache.page])


def check(cache: KVCache, sequence: int, tokens: list[int]) -> None:
    """What the sequence holds is what was written; what it lacks, no later query sees."""
    length = cache.length(sequence)
    for layer, index in enumerate(cache.group_of):
        group = cache.groups[index]
        for logical, number in enumerate(group.table(sequence)):
            start, stop = logical * cache.page, min((logical + 1) * cache.page, length)
            if number == GIVEN_BACK:
                q, kv = torch.arange(length, length + 60)[:, None], torch.arange(start, stop)
                assert not group.mask(torch.tensor(0), torch.tensor(0), q, kv).any()
            else:
                wanted = torch.tensor(tokens[start:stop]) + 1000.0 * layer
                assert torch.equal(held(cache, layer, sequence, start, stop)[0][0, :, 0], wanted)


@pytest.mark.parametrize("names", [[name] for name in MASKS] + [list(MASKS)], ids=" ".join)
@pytest.mark.parametrize("freed", [True, False])
def test_a_later_sequence_adopts_what_an_earlier_one_computed(names: list[str], freed: bool) -> None:
    cache, tokens = cache_of(*names, pages=200), list(range(23))
    first = cache.new()
    grow(cache, first, tokens)
    if freed:
        cache.free(first)
    for common in (23, 22, 13, 12, 3, 1, 0):
        asked = [*tokens[:common], *range(500, 510)]
        twin = cache.adopt(asked)
        assert cache.length(twin) == common // 2 * 2
        check(cache, twin, asked)
        grow(cache, twin, asked)
        check(cache, twin, asked)
        cache.free(twin)
    if not freed:
        check(cache, first, tokens)
        cache.free(first)
    assert cache.free_pages() == [200] * len(names)


def test_in_each_group_only_what_a_later_query_sees_must_be_left() -> None:
    """A window's early pages are taken by others; what is behind the window of the next query is not missed."""
    cache, tokens = cache_of("causal", "window"), list(range(20))
    grow(cache, first := cache.new(), tokens)
    cache.free(first)
    window_group = cache.groups[1].pool
    while window_group._free:
        window_group.take()
    for _ in range(6):  # the pages that the window let go of first
        window_group.take()
    found = cache.adopt(tokens)
    assert cache.length(found) == 20
    check(cache, found, tokens)
    cache.free(found)
    # After 14 tokens the query sees keys 10 to 13, pages 5 and 6, and page 5 is gone; after 16 tokens 6 and 7 are left.
    for length, usable in ((16, 16), (15, 0), (14, 0), (12, 0)):
        twin = cache.adopt(tokens[:length])
        assert cache.length(twin) == usable
        cache.free(twin)


def test_what_is_found_in_one_group_alone_is_not_used() -> None:
    cache, tokens = cache_of("causal", "window", pages=10), list(range(20))
    grow(cache, first := cache.new(), tokens)
    cache.free(first)
    for _ in range(4):
        cache.groups[0].pool.take()  # the end of the first, in the group that forgets nothing
    twin = cache.adopt(tokens)
    assert cache.length(twin) == 12
    check(cache, twin, tokens)


@pytest.mark.parametrize("mask", [prefix_lm(6), block_diagonal([8, 8])], ids=str)
def test_a_mask_that_looks_ahead_remembers_nothing(mask: Mask) -> None:
    """A key may hang on tokens that came after it. One such layer is enough."""
    cache = KVCache([CacheLayer(1, 4, causal()), CacheLayer(1, 4, mask)], 60, page=2, dtype=torch.float32)
    grow(cache, first := cache.new(), list(range(20)))
    assert cache.length(cache.adopt(list(range(20)))) == 0
    cache.free(first)
    assert [group.pool.idle for group in cache.groups] == [0, 0]


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 6])
def test_what_is_cut_and_written_anew_has_no_old_name(cut: int) -> None:
    """The page that the cut goes through is written over where it lies: its old name must not lead there."""
    cache, tokens = cache_of("causal"), list(range(8))
    grow(cache, sequence := cache.new(), tokens)
    cache.truncate(sequence, cut)
    other = [*tokens[:cut], *range(100, 108 - cut)]
    grow(cache, sequence, other)
    check(cache, sequence, other)
    for asked in (tokens, other):
        twin = cache.adopt(asked)
        check(cache, twin, asked)
        assert cache.length(twin) == (8 if asked is other or cut % 2 == 0 else cut // 2 * 2)
        cache.free(twin)


def test_a_page_that_another_found_is_copied_before_it_is_written_anew() -> None:
    cache, tokens = cache_of("causal"), list(range(8))
    grow(cache, first := cache.new(), tokens)
    cache.truncate(first, 7)
    twin = cache.adopt(tokens)
    assert cache.need(first, 1) == [1]
    assert cache.room(first, cache.free_pages()) == -7 + 6
    grow(cache, first, [*tokens[:7], 99])
    check(cache, twin, tokens)
    check(cache, first, [*tokens[:7], 99])


def test_roots_keep_sequences_apart() -> None:
    def found(root: Hashable) -> int:
        return cache.length(cache.adopt(list(range(8)), root))

    cache = cache_of("causal")
    grow(cache, cache.new((0, 1)), list(range(8)))
    assert [found((0, 1)), found((0, 2)), found(None)] == [8, 0, 0]


@pytest.mark.parametrize("mask", MASKS.values(), ids=str)
@pytest.mark.parametrize("page", [1, 2, 4])
def test_the_most_that_is_held_is_what_a_sequence_comes_to_hold(mask: Mask, page: int) -> None:
    group, most = PageGroup(mask, page, 60), 0
    group.new(0)
    for length in range(48):
        assert group.room(0, length, 1) >= 1
        group.grow(0, length, 1)
        most = max(most, group.held(0))
        assert group.most_held(length // page + 1) == most


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_room_is_what_can_be_appended(data: st.DataObject) -> None:
    """To the token, whatever is shared and whatever was let go."""
    names = data.draw(st.lists(st.sampled_from(sorted(MASKS)), min_size=1, max_size=2, unique=True))
    cache = cache_of(*names, page=data.draw(st.sampled_from([1, 3, 4])), pages=9)
    sequences = [cache.new()]
    for _ in range(data.draw(st.integers(1, 6))):
        sequence = data.draw(st.sampled_from(sequences))
        room = cache.room(sequence)
        count = data.draw(st.integers(0, max(0, min(room, 6))))
        if count:
            need = cache.need(sequence, count)
            before = cache.free_pages()
            cache.append([sequence], [count])
            assert [a - b for a, b in zip(before, cache.free_pages(), strict=True)] == need
        if data.draw(st.booleans()):
            sequences.append(cache.fork(sequence))
    for sequence in sequences:
        room = max(0, cache.room(sequence))
        assert all(n <= f for n, f in zip(cache.need(sequence, room), cache.free_pages(), strict=True))
        assert any(n > f for n, f in zip(cache.need(sequence, room + 1), cache.free_pages(), strict=True))


def test_pages_in_a_row_for_a_lone_sequence() -> None:
    """Room that others left is taken in order, so that the keys of a lone sequence lie in one run."""
    group = PageGroup(causal(), 4, 8)
    for sequence in range(2):
        group.new(sequence)
        group.grow(sequence, 0, 16)
    group.free(1)
    group.free(0)
    group.new(2)
    assert group.grow(2, 0, 32).tolist() == np.arange(32).tolist()
