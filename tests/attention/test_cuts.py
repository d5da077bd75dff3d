"""What was appended last can be cut again under every mask, as a wrong guess is, and the cut costs nothing later."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexdecode.attention.cache import KVCache
from flexdecode.attention.masks import Mask, causal, chunked, window
from flexdecode.attention.pages import GIVEN_BACK
from tests.attention.dense import Counting, Ends
from tests.attention.test_cache import LAYERS
from tests.attention.test_pages import group_of


@settings(deadline=None)
@given(
    st.sampled_from([causal(), *(causal() & window(n) for n in (1, 3, 9, 40)), causal() & chunked(5), Ends(2, 3)]),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 70),
    st.lists(st.tuples(st.integers(1, 17), st.integers(0, 17)), max_size=30),
)
def test_what_was_appended_last_can_be_cut_again(
    mask: Mask, page: int, start: int, steps: list[tuple[int, int]]
) -> None:
    """Under windows smaller than a page too; and what is held in the end is held by a sequence that never guessed."""
    group, length = group_of(page, 2000, mask, sequences=2), start
    if start:
        group.grow(0, 0, start)
        group.grow(1, 0, start)
    for count, keep in steps:
        group.grow(0, length, count)
        kept = min(keep, count)
        group.check_truncate(0, length + kept)
        group.truncate(0, length + kept)
        for at in range(length, length + kept):
            group.grow(1, at, 1)
        length += kept
    for sequence in (0, 1):
        group.give_back(sequence, length)
    gone = [[number == GIVEN_BACK for number in group.table(sequence)] for sequence in (0, 1)]
    assert gone[0] == gone[1]
    assert group.has_holes(0) == any(gone[0])


@pytest.mark.parametrize(("mask", "most"), [(causal(), 4), (causal() & window(64), 9)], ids=str)
def test_cutting_what_came_last_asks_nothing_anew(mask: Mask, most: int) -> None:
    counting = Counting(mask)
    group = group_of(16, 1000, counting)
    group.grow(0, 0, 3000)
    for length in range(3000, 6000, 2):
        counting.blocks.clear()
        group.grow(0, length, 9)
        group.truncate(0, length + 2)
        assert length < 3100 or sum(counting.blocks) <= most


def test_what_was_appended_last_can_be_cut_again_under_every_mask() -> None:
    cache = KVCache(LAYERS, 400, page=4)
    sequence = cache.new()
    for step in range(60):
        length = cache.length(sequence)
        assert cache.room(sequence) >= 9
        cache.append([sequence], [9])
        cache.truncate(sequence, length + step % 10)
    held_pages = [group.held(sequence) for group in cache.groups]
    assert held_pages[1] < 10 < held_pages[0]
