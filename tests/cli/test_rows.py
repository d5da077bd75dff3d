"""One line in, one row out: what a line is taken for, and the row in its shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexdecode.cli.rows import BEGINNINGS, Line, error_row, job_of, read_line, read_row
from flexdecode.generation.params import SamplingParams

DEFAULTS = SamplingParams(max_tokens=7, temperature=0.5)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def openai(**changes: Any) -> dict[str, Any]:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", **CHAT}}
    return {key: value for key, value in (line | changes).items() if value is not ...}


def line_of(value: object, number: int = 3) -> Line:
    return read_line(number, json.dumps(value).encode() + b"\n")


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"prompt": "x"}, 3),
        ({"prompt": "x", "id": None}, 3),
        ({"prompt": "x", "id": "x"}, "x"),
        ({"prompt": "x", "id": ""}, ""),
        ({"prompt": "x", "id": 12}, 12),
        (openai(), "a"),
        (openai(id="b"), "a"),
    ],
)
def test_the_key_is_its_id_or_its_number(value: dict[str, Any], key: object) -> None:
    assert line_of(value).key == key


def test_defaults_fill_what_a_line_leaves_open() -> None:
    assert job_of(line_of({"prompt": "x"}), DEFAULTS).params == DEFAULTS
    own = job_of(line_of({"prompt": "x", "max_tokens": 2, "top_k": 4, "temperature": None}), DEFAULTS).params
    assert own == SamplingParams(max_tokens=2, temperature=0.5, top_k=4)
    assert job_of(line_of(openai()), DEFAULTS).params == DEFAULTS


def test_every_parameter_of_ours_reaches_its_field() -> None:
    asked: dict[str, Any] = {"min_tokens": 2, "min_p": 0.5, "n": 2, "stop": ["x"], "seed": 4, "logprobs": 3}
    asked |= {"ignore_eos": True, "stop_token_ids": [5], "repetition_penalty": 1.5, "presence_penalty": 1}
    params = job_of(line_of({**CHAT, **asked, "logit_bias": {"7": 1}}), DEFAULTS).params
    assert params == SamplingParams(max_tokens=7, temperature=0.5, logit_bias={7: 1.0}, **asked)


def test_prompts_and_messages() -> None:
    assert job_of(line_of({"prompt": [1, 2]}), DEFAULTS).prompts == ([1, 2],)
    assert job_of(line_of({"prompt": ["one"]}), DEFAULTS).prompts == ("one",)
    assert job_of(line_of(CHAT), DEFAULTS).messages == CHAT["messages"]
    url, body = "/v1/completions", {"prompt": ["a", "b"]}
    assert job_of(line_of(openai(url=url, body=body)), DEFAULTS).prompts == ("a", "b")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1], "object"),
        ("x", "object"),
        (None, "object"),
        ({}, "neither"),
        ({"prompt": "x", **CHAT}, "both"),
        ({"prompt": None}, "neither"),
        ({"prompt": ["a", "b"]}, "2 prompts"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "x", "id": 1.5}, "id must be"),
        ({"prompt": "x", "id": True}, "id must be"),
        ({"prompt": "x", "id": ["a"]}, "id must be"),
        ({"prompt": "x", "temprature": 1}, "did you mean temperature"),
        ({"prompt": "x", "stream": False}, "'stream'"),
        ({"prompt": "x", "top_p": 2}, "top_p"),
        ({"prompt": "x", "n": 129}, "n must"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "x", "messages": [], "id": 1}, "both"),
        (openai(custom_id=...), "custom_id must be"),
        (openai(custom_id=5), "custom_id must be"),
        (openai(url=...), "url must be /v1/chat/completions or"),
        (openai(url="/v1/embeddings"), "'/v1/embeddings'"),
        (openai(url=["x"]), "url"),
        (openai(method="GET"), "method"),
        (openai(body=...), "body"),
        (openai(body="x"), "body"),
        (openai(temperature=1), "'temperature'"),
        (openai(body={**CHAT, "tools": [{}]}), "tools"),
    ],
)
def test_what_a_line_must_not_ask_becomes_an_error_row_with_its_number(value: object, words: str) -> None:
    line = line_of(value, number=17)
    with pytest.raises(ValueError, match=words) as caught:
        job_of(line, DEFAULTS)
    row = json.loads(json.dumps(error_row(line, caught.value)))
    assert row["error"]["line"] == 17
    assert words in row["error"]["message"]
    assert ("custom_id" in row) == line.openai
    if line.openai:
        assert row["response"]["status_code"] == 400
        assert row["response"]["body"]["error"]["message"] == row["error"]["message"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"prompt": "x"', "not JSON"),
        (b"\xff\xfe\n", "not UTF-8 at byte 0"),
        (b'{"prompt": "x", "temperature": NaN}\n', "NaN"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"id": ' + b"9" * 5000 + b"}", "not JSON"),
    ],
)
def test_what_is_no_json(data: bytes, words: str) -> None:
    line = read_line(5, data)
    assert line.problem is not None
    assert words in line.problem
    assert line.key == 5


def test_a_digest_is_of_what_a_line_says_not_of_how_it_is_written() -> None:
    first, second, other = (
        read_line(1, data).digest
        for data in (b'{"prompt":"x","n":1}\n', b' {"n": 1, "prompt": "\\u0078"}\r\n', b'{"prompt":"y","n":1}')
    )
    assert first == second != other


@given(st.binary(max_size=60) | st.text().map(lambda text: json.dumps({"id": text, "prompt": 1}).encode()))
def test_the_row_of_any_line_is_read_back(data: bytes) -> None:
    line = read_line(4, data)
    encoded = json.dumps(error_row(line, ValueError("wrong"))).encode()
    assert encoded.startswith(BEGINNINGS)
    row = read_row(encoded)
    assert row is not None
    assert (row.key, row.digest, row.failed) == (line.key, line.digest, True)


@pytest.mark.parametrize(
    "value", [5, None, {}, {"id": 1}, {"id": True, "request": "a"}, {"custom_id": None, "id": "x"}]
)
def test_what_is_no_row(value: object) -> None:
    assert read_row(json.dumps(value).encode()) is None
