"""Bodies of OpenAI's endpoints: what they ask, what they must not ask, and the bodies that answer them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexdecode.generation.params import SamplingParams
from flexdecode.generation.results import Completion, Stats
from flexdecode.jobs import Job
from flexdecode.serving.openai import (
    ENDPOINTS,
    FieldError,
    chat_body,
    chat_job,
    completion_body,
    completion_job,
    error_body,
    usage,
)
from tests.checkpoints import puppet
from tests.llm.asking import load

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"prompt": "hi"}
NONE = SamplingParams()
READ = [(chat_job, CHAT), (completion_job, TEXT)]
STATS = Stats(3, 2, 0.1, 0.1, 0.1)


def made(text: str = "ab", ids: tuple[int, ...] = (97, 98), prompt: int = 3) -> Completion:
    return Completion(text, ids, "stop", prompt, None, STATS)


@pytest.mark.parametrize(("read", "body"), READ)
def test_every_parameter_reaches_its_field(read: Any, body: dict[str, Any]) -> None:
    asked: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 3,
        "seed": 7,
        "stop": ["a", "b"],
        "logit_bias": {"5": -100, "6": 2.5},
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "stop_token_ids": [3],
        "ignore_eos": True,
    }
    params = read(body | asked | {"max_tokens": 9}, NONE).params
    assert params == SamplingParams(**asked | {"logit_bias": {5: -100, 6: 2.5}}, max_tokens=9)


@pytest.mark.parametrize(("read", "body"), READ)
def test_what_is_left_out_or_null_comes_from_the_defaults(read: Any, body: dict[str, Any]) -> None:
    defaults = SamplingParams(max_tokens=5, temperature=0.25, stop=("x",), seed=3)
    assert read(body, defaults).params == defaults
    nulls = dict.fromkeys(("temperature", "max_tokens", "max_completion_tokens", "stop", "n", "logit_bias", "tools"))
    assert read(body | nulls, defaults).params == defaults
    assert read(body | {"temperature": 0, "stop": []}, defaults).params == SamplingParams(
        max_tokens=5, temperature=0.0, seed=3
    )


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_budget(name: str) -> None:
    assert chat_job(CHAT | {name: 7}, SamplingParams(max_tokens=3)).params.max_tokens == 7
    with pytest.raises(FieldError, match="max_completion_tokens"):
        chat_job(CHAT | {"max_tokens": 7, "max_completion_tokens": 7}, NONE)


def test_log_probabilities_are_asked_for_in_each_endpoints_way() -> None:
    assert chat_job(CHAT, NONE).params.logprobs is None
    assert chat_job(CHAT | {"logprobs": False}, NONE).params.logprobs is None
    assert chat_job(CHAT | {"logprobs": True}, NONE).params.logprobs == 0
    assert chat_job(CHAT | {"logprobs": True, "top_logprobs": 20}, NONE).params.logprobs == 20
    assert completion_job(TEXT | {"logprobs": 0}, NONE).params.logprobs == 0
    assert completion_job(TEXT | {"logprobs": 5}, NONE).params.logprobs == 5


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"temprature": 1}, "temprature"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stream": True}, "stream"),
        ({"stream": 0}, "stream"),
        ({"stream": "yes"}, "stream"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 4}, "best_of"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": True}, "n"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": [["a"]]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"seed": 1.5}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": None, "presence_penalty": []}, "presence_penalty"),
    ],
)
@pytest.mark.parametrize(("read", "body"), READ)
def test_what_cannot_be_served_is_refused_by_name(
    read: Any, body: dict[str, Any], extra: dict[str, Any], field: str
) -> None:
    with pytest.raises(FieldError, match=field) as caught:
        read(body | extra, NONE)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    assert error_body(caught.value)["error"]["param"] == field


@pytest.mark.parametrize(
    ("read", "body", "field"),
    [
        (chat_job, {}, "messages"),
        (chat_job, {"messages": None}, "messages"),
        (chat_job, {"messages": []}, "messages"),
        (chat_job, {"messages": "hi"}, "messages"),
        (chat_job, {"messages": ["hi"]}, "messages"),
        (chat_job, CHAT | {"prompt": "hi"}, "prompt"),
        (chat_job, CHAT | {"logprobs": 5}, "logprobs"),
        (chat_job, CHAT | {"logprobs": 1}, "logprobs"),
        (chat_job, CHAT | {"top_logprobs": 3}, "top_logprobs"),
        (chat_job, CHAT | {"logprobs": True, "top_logprobs": 100}, "top_logprobs"),
        (chat_job, CHAT | {"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        (completion_job, {}, "prompt"),
        (completion_job, {"prompt": None}, "prompt"),
        (completion_job, {"prompt": []}, "prompt"),
        (completion_job, {"prompt": 5}, "prompt"),
        (completion_job, {"prompt": [True]}, "prompt"),
        (completion_job, {"prompt": [1.0]}, "prompt"),
        (completion_job, {"prompt": ["a", 1]}, "prompt"),
        (completion_job, {"prompt": [[1], "a"]}, "prompt"),
        (completion_job, TEXT | {"messages": []}, "messages"),
        (completion_job, TEXT | {"logprobs": True}, "logprobs"),
        (completion_job, TEXT | {"logprobs": 100}, "logprobs"),
    ],
)
def test_each_endpoint_has_its_own_fields(read: Any, body: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        read(body, NONE)
    assert caught.value.field == field


def test_a_misspelt_name_gets_the_nearest_one() -> None:
    with pytest.raises(FieldError, match=r"'temprature' \(did you mean temperature\?\)"):
        chat_job(CHAT | {"temprature": 1}, NONE)


@pytest.mark.parametrize(("read", "body"), READ)
def test_what_says_only_that_something_is_off_is_no_fault(read: Any, body: dict[str, Any]) -> None:
    off = {"stream": False, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "echo": False}
    books = {"model": "any", "user": "me", "metadata": {"a": "b"}, "store": True}
    assert read(body | off | books, NONE) == read(body, NONE)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
        ([[]], ([],)),
    ],
)
def test_prompts_of_every_kind(prompt: Any, prompts: Any) -> None:
    assert completion_job({"prompt": prompt}, NONE).prompts == prompts


NAMES = st.sampled_from(["prompt", "messages", "temperature", "n", "stop", "seed", "logit_bias", "logprobs", "tools"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
VALUES = st.recursive(
    SCALARS, lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(max_size=3), of, max_size=3), max_leaves=6
)


@given(st.dictionaries(NAMES | st.text(max_size=9), VALUES))
def test_any_body_is_a_job_or_an_error_that_is_json(body: dict[str, Any]) -> None:
    for endpoint in ENDPOINTS.values():
        try:
            job = endpoint.job(body, NONE)
        except ValueError as error:
            told = error_body(error)["error"]
            json.dumps(told, allow_nan=False)
            continue
        assert job.answers >= 1


def test_usage_counts_a_prompt_once_and_every_answer() -> None:
    job = Job(SamplingParams(n=2), ("abc", "abcde"))
    four = [made(), made(ids=(97,)), made(prompt=5), made(prompt=5)]
    assert usage(four, job) == {"prompt_tokens": 8, "completion_tokens": 7, "total_tokens": 15}


def test_bodies_have_the_format_of_their_endpoint() -> None:
    job = Job(SamplingParams(n=2), messages=CHAT["messages"])
    told = chat_body([made(), made("x")], job, None, id="7", model="m", created=5)
    assert (told["id"], told["object"], told["created"], told["model"]) == ("chatcmpl-7", "chat.completion", 5, "m")
    assert [choice["index"] for choice in told["choices"]] == [0, 1]
    assert told["choices"][1] == {
        "index": 1,
        "message": {"role": "assistant", "content": "x", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    told = completion_body([made()], Job(NONE, ("abc",)), None, id="7", model="m", created=5)
    assert (told["id"], told["object"]) == ("cmpl-7", "text_completion")
    assert told["choices"] == [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}]


def test_choices_are_those_of_single_requests(tmp_path: Path) -> None:
    """Two prompts and n = 2 in one body: four choices, prompt by prompt, each as if asked alone."""
    puppet(tmp_path, "abc")
    llm = load(tmp_path)
    job = completion_job({"prompt": ["<bos>", "xb"], "n": 2, "max_tokens": 8}, NONE)
    (finished,) = llm.complete([job])
    told = completion_body(finished.completions, job, llm.tokenizer, id="1", model="m", created=0)
    assert [choice["text"] for choice in told["choices"]] == ["abc", "abc", "c", "c"]
    assert told["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}
