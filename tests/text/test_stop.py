"""Stop strings against a reader that looks at the whole text after each character."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexdecode.text.detokenize import Detokenizer
from flexdecode.text.stop import StopStrings
from flexdecode.text.tokenizer import Tokenizer


def oracle(text: str, stops: list[str]) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


def read(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    watch = StopStrings(stops)
    chunks, matched = [], False
    for piece in pieces:
        chunk, matched = watch.push(piece)
        chunks.append(chunk)
        if matched:
            break
    return [*chunks, watch.flush()], matched


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["DEFG"], "ABC"),
        (["HIJ"], "ABCDEFG"),
        (["DEX", "EFG"], "ABCD"),
        (["XYZ"], "ABCDEFGHIJ"),
        (["HIJK"], "ABCDEFGHIJ"),  # a partial match at the end is text after all
        (["ABCDEFGHIJ"], ""),
        (["A"], ""),
        (["J"], "ABCDEFGHI"),
        ([], "ABCDEFGHIJ"),
        (["BCDX", "CX", "DEFX", "GH", "FGHI"], "ABCDEF"),
        (["CD", "BCD"], "A"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_text_ends_before_the_stop_string(stops: list[str], expected: str, size: int) -> None:
    """B82: a stop string was looked for in each token alone, and half of it had been sent."""
    text = "ABCDEFGHIJ"
    chunks, matched = read([text[place : place + size] for place in range(0, 10, size)], stops)
    assert "".join(chunks) == expected
    assert matched == oracle(text, stops)[1]


@pytest.mark.parametrize(("text", "stop"), [("aaab", "aab"), ("abababc", "ababc"), ("aabaaabaaac", "aabaaac")])
def test_a_match_may_begin_inside_a_failed_one(text: str, stop: str) -> None:
    chunks, matched = read(list(text), [stop])
    assert ("".join(chunks), matched) == (text.removesuffix(stop), True)


@settings(max_examples=500)
@given(
    text=st.text("ab€", max_size=30) | st.text("ab", max_size=30),
    stops=st.lists(st.text("ab€", min_size=1, max_size=5) | st.text("ab", min_size=3, max_size=6), max_size=4),
    cuts=st.lists(st.integers(0, 30)),
)
def test_any_text_cut_anywhere(text: str, stops: list[str], cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    chunks, matched = read(pieces, stops)
    assert ("".join(chunks), matched) == oracle(text, stops)


@given(text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_is_held_back_that_could_not_match(text: str, stops: list[str]) -> None:
    """What has been released is everything but the longest end of the text that begins some stop string."""
    watch = StopStrings(stops)
    released = ""
    for end, char in enumerate(text, 1):
        chunk, matched = watch.push(char)
        released += chunk
        if matched:
            return
        starts = [n for stop in stops for n in range(len(stop)) if text[:end].endswith(stop[:n])]
        assert released == text[: end - max(starts)]


@pytest.mark.parametrize(("stops", "expected"), [(["ZZZ"], "ab €😀z"), (["€"], "ab "), (["😀z"], "ab €")])
def test_stop_strings_of_any_script(byte_level: Tokenizer, stops: list[str], expected: str) -> None:
    """B83: text was held back at a byte offset inside a character."""
    detokenizer = Detokenizer(byte_level)
    pieces = [*map(detokenizer.push, "ab €😀z".encode()), detokenizer.flush()]
    chunks, _ = read(pieces, stops)
    assert "".join(chunks) == expected
    assert all(chunk.encode() is not None for chunk in chunks)


def test_after_a_match_nothing_more_comes() -> None:
    watch = StopStrings(["b"])
    assert watch.push("abc") == ("a", True)
    assert watch.matched == "b"
    assert watch.push("def") == ("", True)
    assert watch.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings(["a", ""])
