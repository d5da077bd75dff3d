"""Names of prefixes: found by every token up to there, compared and not only hashed, and gone with their owners."""

from __future__ import annotations

import gc

from hypothesis import given
from hypothesis import strategies as st

from flexdecode.attention.prefix import PageName, Prefixes


def told(prefixes: Prefixes, sequence: int, tokens: list[int], root: object = None) -> list[PageName]:
    prefixes.start(sequence, root)  # type: ignore[arg-type]
    page = prefixes.page
    return [prefixes.extend(sequence, tokens[i : i + page]) for i in range(0, len(tokens) - page + 1, page)]


@given(
    known=st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=6),
    asked=st.lists(st.integers(0, 1), max_size=12),
    page=st.integers(1, 3),
)
def test_the_longest_beginning_in_whole_pages_is_found(known: list[list[int]], asked: list[int], page: int) -> None:
    prefixes = Prefixes(page)
    names = [told(prefixes, sequence, tokens) for sequence, tokens in enumerate(known)]

    def common(tokens: list[int]) -> int:
        pages = min(len(tokens), len(asked)) // page
        return max(n for n in range(pages + 1) if tokens[: n * page] == asked[: n * page])

    found = prefixes.find(None, asked)
    assert len(found) == max(map(common, known), default=0)
    for tokens, own in zip(known, names, strict=True):
        assert own[: common(tokens)] == found[: common(tokens)]
        assert [name.pages for name in own] == list(range(1, len(own) + 1))


class Colliding(int):
    """A token id whose hash is that of every other."""

    def __hash__(self) -> int:
        return 7


def test_tokens_of_one_hash_stay_apart() -> None:
    prefixes = Prefixes(2)
    one, other = [Colliding(n) for n in (1, 2, 3, 4)], [Colliding(n) for n in (1, 2, 4, 3)]
    assert hash(tuple(one)) == hash(tuple(other))
    names, others = told(prefixes, 0, one), told(prefixes, 1, other)
    assert names[0] is others[0]
    assert names[1] is not others[1]
    assert prefixes.find(None, one) == names
    assert prefixes.find(None, other) == others
    assert prefixes.find(None, [Colliding(n) for n in (2, 1, 3, 4)]) == []


def test_equal_pages_after_different_ones_are_different() -> None:
    prefixes = Prefixes(2)
    first, second = told(prefixes, 0, [1, 1, 5, 6]), told(prefixes, 1, [2, 2, 5, 6])
    assert first[1] is not second[1]
    assert prefixes.find(None, [5, 6]) == []


def test_roots_keep_prefixes_apart() -> None:
    prefixes = Prefixes(2)
    names = told(prefixes, 0, [1, 2, 3, 4], root=(0,))
    assert prefixes.find((1,), [1, 2, 3, 4]) == []
    assert prefixes.find((0,), [1, 2, 3, 4]) == names


def test_forks_share_and_cuts_go_back() -> None:
    prefixes = Prefixes(2)
    names = told(prefixes, 0, [1, 2, 3, 4])
    prefixes.fork(0, 1)
    prefixes.truncate(0, 1)
    assert (prefixes.pages(0), prefixes.pages(1)) == (1, 2)
    assert prefixes.extend(0, [9, 9]).before is names[0]
    assert prefixes.extend(1, [9, 9]).before is names[1]
    prefixes.truncate(0, 5)
    assert prefixes.pages(0) == 2
    prefixes.truncate(0, 0)
    assert prefixes.extend(0, [1, 2]) is names[0]


def test_names_go_with_those_that_had_them() -> None:
    prefixes = Prefixes(1)
    names = told(prefixes, 0, list(range(2000)))
    assert len(prefixes) == 2001
    last = names.pop()
    names.clear()
    prefixes.free(0)
    gc.collect()
    assert len(prefixes) == 2001  # the last one stands for all before it
    assert prefixes.find(None, list(range(3000)))[-1] is last
    del last
    gc.collect()
    assert len(prefixes) == 0
    assert prefixes.find(None, [0]) == []
