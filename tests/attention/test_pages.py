"""Page tables by themselves: which numbers are taken, shared, given back and found again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdecode.attention.masks import Ints, Mask, Queries, Seen, causal, chunked, window
from flexdecode.attention.pages import GIVEN_BACK, PageGroup
from tests.attention.dense import Blurred, ByHead, Counting, Ends, Holes, Stripes, visible


def group_of(page: int, pages: int, mask: Mask | None = None, sequences: int = 1) -> PageGroup:
    group = PageGroup(causal() if mask is None else mask, page, pages)
    for sequence in range(sequences):
        group.new(sequence)
    return group


def slots(group: PageGroup, sequence: int, start: int, stop: int) -> list[int]:
    found = group.slots(sequence, np.arange(start, stop))
    assert found.dtype == np.int64
    numbers: list[int] = found.tolist()
    return numbers


def grown(group: PageGroup, sequence: int, length: int, count: int) -> list[int]:
    found = group.grow(sequence, length, count)
    assert found.dtype == np.int64
    numbers: list[int] = found.tolist()
    return numbers


@pytest.mark.parametrize("page", [1, 3, 16, 64])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 130])
def test_a_lone_sequence_lies_in_one_run(page: int, count: int) -> None:
    group = group_of(page, -(-count // page) + 2)
    assert group.need(0, 0, count) == -(-count // page)
    assert grown(group, 0, 0, count) == list(range(count))
    for start in {0, count // 2, count - 1}:
        assert slots(group, 0, start, count) == list(range(start, count))
    assert group.free_pages == 2


def test_nothing_lies_nowhere() -> None:
    group = group_of(4, 2)
    assert grown(group, 0, 0, 0) == []
    assert slots(group, 0, 0, 0) == []
    group.grow(0, 0, 3)
    assert slots(group, 0, 3, 3) == []
    assert grown(group, 0, 3, 0) == []
    assert group.table(0) == [0]


def test_growing_fills_the_last_page_first() -> None:
    group = group_of(4, 3)
    assert grown(group, 0, 0, 3) == [0, 1, 2]
    assert group.need(0, 3, 1) == 0
    assert grown(group, 0, 3, 1) == [3]
    assert group.need(0, 4, 1) == 1
    assert grown(group, 0, 4, 5) == [4, 5, 6, 7, 8]
    assert group.need(0, 9, 0) == 0


def test_freed_pages_are_taken_again_and_found_in_order() -> None:
    """Paged kernels elsewhere indexed by slot where the logical position was meant. Here a sequence ends up on pages
    7, 1, 3 and is read in the order of its positions."""
    group = group_of(2, 8, sequences=9)
    for sequence in range(8):
        assert grown(group, sequence, 0, 2) == [2 * sequence, 2 * sequence + 1]
    taken = []
    for step, sequence in enumerate([7, 1, 3]):
        group.free(sequence)
        taken += grown(group, 8, 2 * step, 2)
    assert group.table(8) == group.numbers(8).tolist() == [7, 1, 3]
    assert group.numbers(8).dtype == np.int32
    assert taken == [14, 15, 2, 3, 6, 7]
    assert slots(group, 8, 0, 6) == taken
    assert slots(group, 8, 1, 5) == taken[1:5]
    assert slots(group, 8, 2, 4) == [2, 3]


def test_keys_may_be_asked_for_in_any_order() -> None:
    group = group_of(1, 8, sequences=8)
    for sequence in range(7):
        group.grow(sequence, 0, 1)
    for step, sequence in enumerate([0, 2, 1, 3]):
        group.free(sequence)
        group.grow(7, step, 1)
    assert slots(group, 7, 0, 4) == [0, 2, 1, 3]
    assert group.slots(7, np.array([3, 0, 0, 1])).tolist() == [3, 0, 0, 2]


@pytest.mark.parametrize("pages", [1, 15, 16, 17, 40, 1000])
def test_a_table_has_room_for_any_number_of_pages(pages: int) -> None:
    """It doubles as it fills; a fork made on the way keeps what it had and does not write into its twin's."""
    group = group_of(1, 2 * pages)
    group.grow(0, 0, pages)
    group.fork(0, 1)
    for step in range(pages):
        sequence = step % 2
        assert grown(group, sequence, len(group.table(sequence)), 1) == [pages + step]
    for sequence in (0, 1):
        assert group.table(sequence)[:pages] == list(range(pages))
        assert len(set(group.table(sequence))) == len(group.table(sequence))
    assert sorted({*group.table(0), *group.table(1)}) == list(range(2 * pages))


def test_addresses_beyond_32_bits() -> None:
    """int32 offsets into a pool wrapped: page numbers are int32, slots int64."""
    page = 2**20
    group = group_of(page, 5000)
    group.pool._free = [2500, 4999]
    first, last = grown(group, 0, 0, 1), grown(group, 0, 1, page)
    assert first == [2500 * page]
    assert last[-1] == 4999 * page
    assert slots(group, 0, page - 2, page + 1) == [2500 * page + page - 2, 2500 * page + page - 1, 4999 * page]


def test_a_fork_shares_until_one_writes() -> None:
    group = group_of(4, 6)
    group.grow(0, 0, 6)
    group.fork(0, 1)
    assert group.table(1) == group.table(0) == [0, 1]
    assert group.free_pages == 4
    # Position 6 lies in the shared page 1, which the writer must leave as it is.
    assert group.need(1, 6, 1) == 1
    assert group.own_last(1, 6) == [(1, 2)]
    assert grown(group, 1, 6, 1) == [10]
    assert group.table(0) == [0, 1]
    # The other one is alone on page 1 now and writes where it stands.
    assert group.need(0, 6, 1) == 0
    assert group.own_last(0, 6) == []
    group.free(0)
    assert group.free_pages == 4  # page 0 is still held by the twin
    group.free(1)
    assert group.free_pages == 6


def test_a_full_last_page_is_shared_for_good() -> None:
    group = group_of(4, 4)
    group.grow(0, 0, 8)
    group.fork(0, 1)
    assert group.need(1, 8, 1) == 1
    assert group.own_last(1, 8) == []
    assert grown(group, 1, 8, 1) == [8]
    # Cut back into the shared page, the next token needs a copy after all.
    group.truncate(1, 5)
    assert group.table(1) == [0, 1]
    assert group.need(1, 5, 1) == 1
    assert group.own_last(1, 5) == [(1, 2)]


@pytest.mark.parametrize(("size", "page"), [(1, 1), (4, 1), (4, 3), (7, 4), (16, 16), (17, 16), (100, 64)])
def test_a_window_holds_its_pages_however_long_it_grows(size: int, page: int) -> None:
    group = group_of(page, 40, causal() & window(size))
    most = -(-(size - 1) // page) + 1  # size - 1 keys behind the query may straddle one page more
    for length in range(20 * size):
        group.grow(0, length, 1)
        table = group.table(0)
        needed = range(max(0, length - size + 1) // page, len(table))
        assert all(table[logical] != GIVEN_BACK for logical in needed)
        assert 40 - group.free_pages == len([n for n in table if n != GIVEN_BACK]) <= most
    group.free(0)
    assert group.free_pages == 40


def test_a_step_of_many_tokens_keeps_what_its_first_query_sees() -> None:
    group = group_of(2, 20, causal() & window(4))
    group.grow(0, 0, 10)
    assert GIVEN_BACK not in group.table(0)  # the first of the ten is a query, too
    group.grow(0, 10, 6)
    assert group.table(0)[:3] == [GIVEN_BACK] * 3  # query 10 sees keys 7 to 10
    assert GIVEN_BACK not in group.table(0)[3:]


def test_pages_given_back_by_one_twin_stay_with_the_other() -> None:
    group = group_of(1, 12, causal() & window(2))
    group.grow(0, 0, 4)
    group.fork(0, 1)
    group.grow(1, 4, 1)
    assert group.table(1)[:3] == [GIVEN_BACK] * 3
    assert group.table(0) == [0, 1, 2, 3]
    assert group.free_pages == 12 - 5
    group.free(0)
    assert group.free_pages == 12 - 2
    group.free(1)
    assert group.free_pages == 12


@pytest.mark.parametrize(
    ("mask", "held", "length", "fits"),
    [
        (causal(), 10, 3, True),
        (causal() & window(4), 10, 10, True),
        (causal() & window(4), 10, 9, True),  # the last step's query 9 kept keys 6 to 9, the next one needs the same
        (causal() & window(4), 10, 8, False),  # query 8 needs key 5
        (causal() & window(4), 10, 0, True),
        (causal() & chunked(4), 10, 8, True),  # a chunk begins there: nothing before is needed
        (causal() & chunked(4), 10, 9, True),
        (causal() & chunked(4), 10, 7, False),
        (causal() & chunked(4), 10, 4, True),
        (Ends(2, 3), 10, 9, True),
        (Ends(2, 3), 10, 8, False),
        (Ends(2, 3), 10, 3, False),
        (Ends(2, 3), 10, 2, True),  # the first keys are held for good
        (Ends(2, 3), 10, 0, True),
    ],
)
def test_truncating_is_refused_where_needed_keys_are_gone(mask: Mask, held: int, length: int, fits: bool) -> None:
    group = group_of(1, 20, mask)
    for at in range(held):
        group.grow(0, at, 1)
    if fits:
        group.check_truncate(0, length)
        group.truncate(0, length)
        group.grow(0, length, 3)
        needed = np.flatnonzero(last_queries(mask, length + 3) >= length)
        assert not any(group.table(0)[key] == GIVEN_BACK for key in needed)
    else:
        with pytest.raises(ValueError, match=f"cannot truncate to {length} tokens"):
            group.check_truncate(0, length)


def test_reading_what_was_given_back_is_an_error() -> None:
    group = group_of(1, 9, causal() & window(2))
    for at in range(5):
        group.grow(0, at, 1)
    with pytest.raises(ValueError, match=r"(?i)of keys 0 to 4 some were given back.*window\W*(size=)?2"):
        group.slots(0, np.arange(5))
    assert slots(group, 0, 3, 5) == [1, 0]  # the window's own, on the pages that were given back


# what no later query sees


def last_queries(mask: Mask, length: int) -> Ints:
    """For each key the last query that sees it: -1 where none does, the end where it is seen for good."""
    end = length + 120  # further than any mask here reaches back
    seen = visible(mask, torch.arange(end), length, heads=2).any(0).numpy()
    found: Ints = np.where(seen.any(0), end - 1 - seen[::-1].argmax(0), -1)
    return found


SIZES = st.integers(1, 40)
EXACT = st.one_of(
    st.just(causal()),
    SIZES.map(lambda n: causal() & window(n)),
    SIZES.map(lambda n: causal() & chunked(n)),
    st.tuples(SIZES, SIZES).map(lambda x: Ends(*x)),
    st.tuples(SIZES, SIZES).map(lambda x: ByHead((causal() & window(x[0]), Ends(x[1], 1)))),
)
VAGUE = st.one_of(
    EXACT.map(Blurred),
    st.integers(2, 4).map(Holes),
    st.tuples(st.integers(1, 5), SIZES).map(lambda x: Stripes(*x)),
)


@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_a_page_is_given_back_when_no_later_query_sees_any_of_its_keys(data: st.DataObject) -> None:
    """Wherever it lies, in the middle of a sequence, too. A mask that cannot answer gives nothing back wrongly."""
    exact = data.draw(st.booleans())
    mask, page = data.draw(EXACT if exact else VAGUE), data.draw(st.sampled_from([1, 3, 8]))
    group, length = group_of(page, 40, mask), 0
    gone: set[int] = set()
    last_P = last_queries(mask, 40 * page).reshape(-1, page).max(1)
    for _ in range(data.draw(st.integers(1, 10))):
        if length and data.draw(st.integers(0, 5)) == 0:
            cut = data.draw(st.integers(0, length))
            lost = [p for p in gone if p * page < cut]
            try:
                group.check_truncate(0, cut)
            except ValueError:
                assert lost
            else:
                assert all(last_P[p] < cut for p in lost)
                group.truncate(0, cut)
                gone, length = {p for p in gone if p * page < cut}, cut
        count = data.draw(st.integers(0, 4 * page))
        group.grow(0, length, count)
        table = group.table(0)
        now = {p for p, number in enumerate(table) if number == GIVEN_BACK}
        unseen = {p for p in range(length // page) if last_P[p] < length}
        assert gone <= now <= unseen
        if exact:
            assert now == unseen
        assert group.has_holes(0) == bool(now)
        assert group.free_pages == 40 - len([n for n in table if n != GIVEN_BACK])
        gone, length = now, length + count
    group.free(0)
    assert group.free_pages == 40


def test_the_middle_is_given_back_and_used_by_another() -> None:
    group = group_of(2, 8, Ends(3, 4), sequences=2)
    for length in range(14):
        group.grow(0, length, 1)
    # Query 13 sees keys 0 to 2 and 10 to 13.
    assert group.table(0) == [0, 1, *[GIVEN_BACK] * 3, *group.table(0)[5:]]
    held = {n for n in group.table(0) if n != GIVEN_BACK}
    assert group.free_pages == 8 - len(held)
    group.grow(1, 0, 2 * group.free_pages)
    assert not {*group.table(1)} & held
    assert slots(group, 0, 0, 3) == [0, 1, 2]
    with pytest.raises(ValueError, match="some were given back"):
        group.slots(0, np.array([2, 5]))


def test_growing_asks_only_for_what_is_undecided() -> None:
    """Pages that every later query sees whole, and those that none sees, are settled: a long context costs no more."""
    for mask, most in ((causal(), 2), (causal() & window(64), 7), (Ends(64, 64), 7)):
        counting = Counting(mask)
        group = group_of(16, 1000, counting)
        for length in range(3000):
            if length == 1500:
                group.fork(0, 1)
            counting.blocks.clear()
            group.grow(0 if length < 1500 else 1, length, 1)
            assert sum(counting.blocks) <= most


@dataclass(frozen=True)
class Early(Mask):
    """The first `size` keys and nothing else, not even the query's own."""

    size: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < self.size

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        return Seen(first_N < self.size, stop_N <= self.size)


@pytest.mark.parametrize("cut", [0, 1, 5, 28, 29])
def test_what_was_cut_and_grew_again_is_given_back_again(cut: int) -> None:
    """Pages are looked at anew: those that lie where others were given back, or were known to stay."""
    group = group_of(1, 40, Ends(2, 4), sequences=2)
    group.grow(0, 0, 30)  # one step: nothing is given back yet
    group.truncate(0, cut)
    for length in range(cut, 30):
        group.grow(0, length, 1)
    for length in range(30):
        group.grow(1, length, 1)
    gone = [[number == GIVEN_BACK for number in group.table(sequence)] for sequence in (0, 1)]
    assert gone[0] == gone[1]
    group.truncate(0, 0)
    for length in range(30):
        group.grow(0, length, 1)
    assert [number == GIVEN_BACK for number in group.table(0)] == gone[1]


def test_truncating_into_a_page_that_was_given_back_is_refused() -> None:
    """Nobody sees its keys, but the next tokens would have to be written there."""
    group = group_of(4, 8, Early(4))
    group.grow(0, 0, 12)
    group.grow(0, 12, 1)
    assert group.table(0)[:3] == [0, GIVEN_BACK, GIVEN_BACK]
    for length in (5, 7, 9, 11):
        with pytest.raises(ValueError, match=f"cannot truncate to {length} tokens"):
            group.check_truncate(0, length)
    for length in (12, 8, 4, 2):
        group.check_truncate(0, length)
        group.truncate(0, length)
        assert min(grown(group, 0, length, 3)) >= 0
        group.truncate(0, length)
