"""Gathering an answer: what arrives, what ends it, what its figures say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flexdecode.cli.answer import as_data, receive, stats_line
from flexdecode.generation.results import Chunk, Stats, TokenLogprob

STATS = Stats(1, 1, 0.1, 0.0, 0.1)


def test_everything_is_gathered_in_order() -> None:
    written: list[str] = []
    first = Chunk("a", (1, 2), (TokenLogprob(1, -1.0), TokenLogprob(2, -2.0)))
    answer = receive(iter([first, Chunk("", (3,)), Chunk("b", (), None, "length", STATS)]), written.append)
    assert written == ["a", "b"]
    assert (answer.text, answer.token_ids, answer.finish_reason, answer.stats) == ("ab", [1, 2, 3], "length", STATS)
    assert answer.logprobs is not None
    assert [entry.token_id for entry in answer.logprobs] == [1, 2]
    assert not answer.interrupted


@pytest.mark.parametrize("at", ["reading", "writing"])
def test_ctrl_c_closes_the_request_wherever_it_arrives(at: str) -> None:
    closed: list[bool] = []

    def chunks() -> Iterator[Chunk]:
        try:
            yield Chunk("a", (1,))
            if at == "reading":
                raise KeyboardInterrupt
            yield Chunk("b", (2,))
        finally:
            closed.append(True)

    def write(text: str) -> None:
        if at == "writing":
            raise KeyboardInterrupt

    answer = receive(chunks(), write)
    assert closed == [True]
    assert answer.interrupted
    assert answer.text == "a"


def test_a_failing_writer_closes_the_request_too() -> None:
    """A pipe that closes must not leave a request that holds its cache."""
    closed: list[bool] = []

    def chunks() -> Iterator[Chunk]:
        try:
            while True:
                yield Chunk("a", (1,))
        finally:
            closed.append(True)

    def write(text: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        receive(chunks(), write)
    assert closed == [True]


def test_a_rate_that_cannot_be_told_is_left_out() -> None:
    line = stats_line(STATS)
    assert line.startswith("prompt 1 token, 10.0 tok/s | new 1 token | first token 0.100 s | peak memory ")


def test_what_was_speculated_is_told_beside_the_rates() -> None:
    stats = Stats(4, 9, 0.5, 2.0, 0.5, proposed_tokens=7, accepted_tokens=5)
    line = stats_line(stats)
    assert line.startswith("prompt 4 tokens, 8.0 tok/s | new 9 tokens, 4.0 tok/s | 5 of 7 proposed were right | first")
    assert "proposed" not in stats_line(STATS)


def test_no_logprobs_is_null_and_not_an_empty_list() -> None:
    answer = receive(iter([Chunk("a", (1,), None, "stop", STATS)]), lambda text: None)
    assert as_data(answer)["logprobs"] is None
