"""Requests: which token is the last, and which tokens are where."""

from __future__ import annotations

from typing import Any

import pytest

from flexdecode.generation.params import SamplingParams
from flexdecode.generation.request import Request
from flexdecode.generation.results import TokenLogprob
from flexdecode.generation.sampler import Sampler


def request(max_tokens: int, **options: Any) -> Request:
    params = SamplingParams(**options).resolve({})
    return Request(0, (1, 2, 3), params, max_tokens, Sampler(params, (1, 2, 3), 100, (9,)), frozenset({9}))


@pytest.mark.parametrize(
    ("options", "tokens", "reason"),
    [
        ({}, [5, 9], "stop"),
        ({}, [5, 6, 7], "length"),
        ({}, [5, 6, 9], "stop"),  # an end at the last allowed token is an end
        ({"ignore_eos": True}, [5, 9, 6], "length"),
        ({"stop_token_ids": (6,)}, [6], "stop"),
        ({"stop_token_ids": (6,), "ignore_eos": True}, [9, 6], "stop"),
        ({"min_tokens": 3}, [9, 9, 9], "stop"),
    ],
)
def test_the_last_token(options: dict[str, Any], tokens: list[int], reason: str) -> None:
    r = request(3, **options)
    for i, token in enumerate(tokens):
        assert r.finish_reason is None, i
        r.accept(token, None)
    assert r.finish_reason == reason


def test_tokens_span_prompt_and_output() -> None:
    r = request(9)
    for token in (4, 5, 6):
        r.accept(token, TokenLogprob(token, -1.0))
    whole = [1, 2, 3, 4, 5, 6]
    assert r.length == 6
    for start in range(7):
        for stop in range(start, 7):
            assert r.tokens(start, stop) == whole[start:stop]
    assert [x.token_id for x in r.logprobs] == [4, 5, 6]


def test_stats_of_a_request_without_tokens_are_finite() -> None:
    r = request(0)
    stats = r.stats()
    assert stats.new_tokens == 0
    assert stats.decode_tokens_per_second == 0.0
    assert stats.decode_seconds == 0.0


def test_the_last_token_needs_no_room() -> None:
    assert [request(n).most_cached for n in (0, 1, 2, 9)] == [3, 3, 4, 11]


def test_requests_are_told_apart_by_identity_and_ordered_by_priority_and_number() -> None:
    a, b = request(1), request(1)
    assert a != b
    assert len({a, b}) == 2
    a.priority, b.number = 1, 5
    assert sorted([a, b], key=lambda r: r.order) == [b, a]
