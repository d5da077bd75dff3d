"""Conversations longer than the context: what stays, in what order, and how rarely the cut moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexdecode.text.overflow import check_overflow, fit

Messages = list[dict[str, Any]]


def render(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """A token for each character, and two around each message."""
    return [token for m in messages for token in (1, *m["content"].encode(), 2)]


def talk(*lengths: int, system: int | None = None) -> Messages:
    """Questions and answers of so many characters each, every one of a letter of its own."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": chr(97 + i % 26) * n} for i, n in enumerate(lengths)]
    return messages if system is None else [{"role": "system", "content": "S" * system}, *messages]


def said(ids: Sequence[int]) -> str:
    """The first character of each message."""
    return "".join(chr(b) for a, b in pairwise(ids) if a == 1)


def test_what_fits_stays_whole() -> None:
    messages = talk(10, 10, 10, system=5)
    for overflow, room in (("error", 1), ("sinks", 25)):
        assert fit(messages, render, 43 + room + 15, 15, overflow) == fit(messages, render, 1000, None, overflow)
        assert fit(messages, render, 43 + 15, 15, overflow).token_ids == render(messages)


@pytest.mark.parametrize(("limit", "max_tokens"), [(43, None), (42, None), (50, 8), (30, 0)])
def test_an_error_names_both_numbers_and_the_remedy(limit: int, max_tokens: int | None) -> None:
    with pytest.raises(ValueError, match=rf"has 43 tokens.* ends at {limit}; clear it, raise .*--overflow sinks") as e:
        fit(talk(10, 10, 10, system=5), render, limit, max_tokens)
    assert (f"max_tokens={max_tokens}" in str(e.value)) == (max_tokens is not None)


def test_the_oldest_turns_go_and_system_text_stays() -> None:
    messages = talk(*[10] * 9, system=5)
    fitted = fit(messages, render, 100, 20, "sinks")
    assert (said(fitted.token_ids), fitted.dropped) == ("Sghi", 6)
    messages.insert(3, {"role": "system", "content": "T"})
    fitted = fit(messages, render, 100, 20, "sinks")
    assert (said(fitted.token_ids), fitted.dropped) == ("STghi", 6)


def test_what_cannot_be_shortened_is_an_error() -> None:
    for messages in (talk(10, 10, 90), talk(10, 10, 10, system=80)):
        with pytest.raises(ValueError, match=r"the last question alone have 9\d tokens, and the context ends at 90"):
            fit(messages, render, 90, None, "sinks")
    alone = talk(200)
    assert fit(alone, render, 90, None, "sinks").token_ids == render(alone), "the engine says what is wrong with it"


def test_a_long_last_question_leaves_a_shorter_answer() -> None:
    fitted = fit(talk(10, 10, 80), render, 90, None, "sinks")
    assert (said(fitted.token_ids), fitted.dropped) == ("c", 2)


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match=r"overflow 'drop' is not known.*error, sinks"):
        check_overflow("drop")
    with pytest.raises(ValueError, match="overflow 'drop'"):
        fit(talk(3), render, 10, None, "drop")


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.none() | st.integers(0, 30),
    st.integers(60, 300),
    st.none() | st.integers(1, 50),
)
def test_there_is_room_and_nothing_but_the_oldest_is_missing(
    lengths: list[int], system: int | None, limit: int, max_tokens: int | None
) -> None:
    lengths = lengths[: len(lengths) - (len(lengths) + 1) % 2] or [1]  # ends with a question
    messages = talk(*lengths, system=system)
    try:
        fitted = fit(messages, render, limit, max_tokens, "sinks")
    except ValueError:
        assert len(render([*messages[: system is not None], messages[-1]])) >= limit
        return
    head = int(system is not None)
    assert fitted.token_ids == render([*messages[:head], *messages[head + fitted.dropped :]])
    assert fitted.dropped % 2 == 0, "whole turns"
    reserve = limit // 4 if max_tokens is None else max_tokens
    at_the_end = fitted.dropped == len(lengths) - 1
    assert len(fitted.token_ids) + reserve <= limit or at_the_end
    if len(render(messages)) + reserve <= limit:
        assert fitted.dropped == 0


def test_most_turns_only_add_to_the_prompt_before() -> None:
    """The cut moves in steps of a third of the room: what lies before it can be found in the cache again."""
    moved, last, size = 0, 0, 0
    for n in range(1, 200, 2):
        fitted = fit(talk(*[8] * n, system=20), render, 400, 60, "sinks")
        moved += fitted.dropped != last
        last, size = fitted.dropped, max(size, len(fitted.token_ids))
    grown = 100 * 20  # tokens that a hundred turns bring
    assert moved <= grown // (340 // 3)
    assert 300 < size <= 340
