"""Page tables by themselves: which numbers are taken, shared, given back and found again."""

from __future__ import annotations

import pytest
import torch

from flexdecode.attention.masks import Mask, causal, chunked, window
from flexdecode.attention.pages import GIVEN_BACK, PageGroup


def group_of(page: int, pages: int, mask: Mask | None = None, sequences: int = 1) -> PageGroup:
    group = PageGroup(mask or causal(), page, pages)
    for sequence in range(sequences):
        group.new(sequence)
    return group


@pytest.mark.parametrize("page", [1, 3, 16, 64])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 130])
def test_a_lone_sequence_lies_in_one_run(page: int, count: int) -> None:
    group = group_of(page, -(-count // page) + 2)
    assert group.need(0, 0, count) == -(-count // page)
    assert group.grow(0, 0, count) == list(range(count))
    for start in {0, count // 2, count - 1}:
        assert group.locate(0, start, count) == slice(start, count)
    assert group.free_pages == 2


def test_nothing_is_a_run_of_nothing() -> None:
    group = group_of(4, 2)
    assert group.locate(0, 0, 0) == slice(0, 0)
    group.grow(0, 0, 3)
    assert group.locate(0, 3, 3) == slice(0, 0)


def test_growing_fills_the_last_page_first() -> None:
    group = group_of(4, 3)
    assert group.grow(0, 0, 3) == [0, 1, 2]
    assert group.need(0, 3, 1) == 0
    assert group.grow(0, 3, 1) == [3]
    assert group.need(0, 4, 1) == 1
    assert group.grow(0, 4, 5) == [4, 5, 6, 7, 8]
    assert group.need(0, 9, 0) == 0


def test_freed_pages_are_taken_again_and_found_in_order() -> None:
    """Paged kernels elsewhere indexed by slot where the logical position was meant. Here a sequence ends up on pages
    7, 1, 3 and is read in the order of its positions."""
    group = group_of(2, 8, sequences=9)
    for sequence in range(8):
        assert group.grow(sequence, 0, 2) == [2 * sequence, 2 * sequence + 1]
    slots = []
    for step, sequence in enumerate([7, 1, 3]):
        group.free(sequence)
        slots += group.grow(8, 2 * step, 2)
    assert group.table(8) == [7, 1, 3]
    assert slots == [14, 15, 2, 3, 6, 7]
    run = group.locate(8, 0, 6)
    assert isinstance(run, torch.Tensor)
    assert run.dtype == torch.int64
    assert run.tolist() == slots
    part = group.locate(8, 1, 5)
    assert isinstance(part, torch.Tensor)
    assert part.tolist() == slots[1:5]
    assert group.locate(8, 2, 4) == slice(2, 4)


def test_pages_backwards_are_no_run() -> None:
    """First and last page as far apart as a run's, but in the wrong order between."""
    group = group_of(1, 8, sequences=8)
    for sequence in range(7):
        group.grow(sequence, 0, 1)
    for step, sequence in enumerate([0, 2, 1, 3]):
        group.free(sequence)
        group.grow(7, step, 1)
    run = group.locate(7, 0, 4)
    assert isinstance(run, torch.Tensor)
    assert run.tolist() == [0, 2, 1, 3]


def test_addresses_beyond_32_bits() -> None:
    """int32 offsets into a pool wrapped: slots are Python's integers, and int64 where they are a tensor."""
    page = 2**20
    group = group_of(page, 5000)
    group._free = [2500, 4999]
    first, last = group.grow(0, 0, 1), group.grow(0, 1, page)
    assert first == [2500 * page]
    assert last[-1] == 4999 * page
    run = group.locate(0, page - 2, page + 1)
    assert isinstance(run, torch.Tensor)
    assert run.dtype == torch.int64
    assert run.tolist() == [2500 * page + page - 2, 2500 * page + page - 1, 4999 * page]


def test_a_fork_shares_until_one_writes() -> None:
    group = group_of(4, 6)
    group.grow(0, 0, 6)
    group.fork(0, 1)
    assert group.table(1) == group.table(0) == [0, 1]
    assert group.free_pages == 4
    # Position 6 lies in the shared page 1, which the writer must leave as it is.
    assert group.need(1, 6, 1) == 1
    assert group.own_last(1, 6) == [(1, 2)]
    assert group.grow(1, 6, 1) == [10]
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
    assert group.grow(1, 8, 1) == [8]
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
        assert GIVEN_BACK not in group.table(0)[mask.horizon(length) :]
    else:
        with pytest.raises(ValueError, match=f"cannot truncate to {length} tokens"):
            group.check_truncate(0, length)


def test_reading_what_was_given_back_is_an_error() -> None:
    group = group_of(1, 9, causal() & window(2))
    for at in range(5):
        group.grow(0, at, 1)
    with pytest.raises(ValueError, match=r"of keys 0 to 4 some were given back.*Window\(size=2\)"):
        group.locate(0, 0, 5)
    run = group.locate(0, 3, 5)  # the window's own, on the pages that were given back
    assert isinstance(run, torch.Tensor)
    assert run.tolist() == [1, 0]
