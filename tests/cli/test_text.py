"""No bytes that a shell, a pipe or a terminal can hold make the edge of the program raise."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexdecode.cli.text import clean, decode, read_prompt, read_stdin


@given(st.binary())
def test_decode_takes_any_bytes(data: bytes) -> None:
    assert decode(data, "data") == data.decode("utf-8", errors="replace")


@given(st.binary(max_size=40))
def test_clean_takes_any_argument_that_a_shell_can_pass(data: bytes) -> None:
    argument = data.decode("utf-8", errors="surrogateescape")
    assert clean(argument, "an argument") == data.decode("utf-8", errors="replace")


@given(st.text(st.characters()))
def test_clean_leaves_valid_text_alone_and_makes_the_rest_valid(text: str) -> None:
    cleaned = clean(text, "text")
    cleaned.encode("utf-8")
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert cleaned == text


def test_a_closed_stdin_is_an_error_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ValueError, match="stdin is closed"):
        read_stdin()


def test_an_empty_prompt_is_a_prompt() -> None:
    assert read_prompt("", None) == ""
