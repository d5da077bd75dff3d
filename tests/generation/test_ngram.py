"""Prompt lookup against a search of the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexdecode.generation.ngram import PromptLookup


def searched(tokens: Sequence[int], most: int, longest: int, shortest: int) -> list[int]:
    """The definition, word for word."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[len(tokens) - n :]:
                return (list(tokens[end:]) * most)[:most]
    return []


@st.composite
def texts(draw: st.DrawFn) -> list[int]:
    """Few ids, so that they repeat; zero among them, which must not be mistaken for "no token"; and large ones."""
    ids = draw(st.sampled_from([[0], [0, 1], [0, 1, 2, 5], [0, 2**32 - 1, 262_143, 1]]))
    return draw(st.lists(st.sampled_from(ids), max_size=60))


@given(
    tokens=texts(),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)), max_size=30),
)
def test_as_a_search_of_the_whole_text(tokens: list[int], lengths: list[int], steps: list[tuple[int, int]]) -> None:
    """Whatever pieces the tokens come in, also none, and whether or not something was asked for on the way."""
    shortest, longest = lengths
    lookup = PromptLookup(longest, shortest)
    known = 0
    for more, most in [*steps, (len(tokens), 5)]:
        known = min(len(tokens), known + more)
        assert lookup.propose(tokens[:known], most) == searched(tokens[:known], most, longest, shortest)


def test_the_latest_of_the_longest() -> None:
    tokens = [1, 2, 3, 70, 9, 2, 3, 71, 3, 72, 1, 2, 3]
    assert PromptLookup(3, 1).propose(tokens, 2) == [70, 9], "three tokens stood there before"
    assert PromptLookup(2, 1).propose(tokens, 2) == [71, 3], "two of them later"
    assert PromptLookup(1, 1).propose(tokens, 9) == [72, 1, 2, 3] * 2 + [72], "one later still, and round"
    assert PromptLookup(4, 4).propose(tokens, 2) == []


def test_the_first_tokens_are_no_longer_ngrams() -> None:
    """A text that begins with id 0 has no zeros before its beginning."""
    assert PromptLookup(4, 2).propose([0, 7, 0], 3) == []
    assert PromptLookup(3, 3).propose([0, 0, 9, 0, 0], 3) == []


class Counted(Sequence[int]):
    """Tokens that count how often one of them was read."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reads = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        found = self.tokens[index]
        self.reads += len(found) if isinstance(index, slice) else 1
        return found


def test_a_long_text_is_read_once() -> None:
    tokens, lookup = Counted(), PromptLookup()
    tokens.tokens = [place % 1000 for place in range(20_000)]
    lookup.propose(tokens, 8)
    assert tokens.reads <= 20_000 + 8
    for step in range(100):
        before = tokens.reads
        tokens.tokens.append(step)
        lookup.propose(tokens, 8)
        assert tokens.reads - before <= 1 + 8


@pytest.mark.parametrize(("longest", "shortest"), [(2, 3), (0, 0), (3, 0), (3, -1)])
def test_lengths_that_are_none(longest: int, shortest: int) -> None:
    with pytest.raises(ValueError, match=f"n-grams of {shortest} to {longest} tokens"):
        PromptLookup(longest, shortest)


def test_one_object_serves_one_request() -> None:
    lookup = PromptLookup()
    lookup.propose([1, 2, 3], 2)
    with pytest.raises(AssertionError, match="2 tokens after 3"):
        lookup.propose([1, 2], 2)
