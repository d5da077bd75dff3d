"""Sampling parameters: every value is checked by name, every 0 means what it says, and defaults come from the model."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import numpy as np
import pytest

from flexdecode.generation.params import SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("max_tokens", [-1, 1.5, "5", True, NAN]),
        ("min_tokens", [-1, 2.0, None]),
        ("temperature", [-1, -1e-9, "hot", NAN, INF, 10**400, False, [1]]),
        ("top_k", [-2, 1.0, "3", True]),
        ("top_p", [-0.1, 1.1, NAN, "1"]),
        ("min_p", [-0.1, 1.5, NAN]),
        ("repetition_penalty", [0, -1, NAN, INF]),
        ("presence_penalty", [-2.1, 2.1, NAN, None]),
        ("frequency_penalty", [-2.1, 2.1, NAN, "0"]),
        ("logit_bias", [{-1: 5}, {"x": 1}, {97: 1000}, {97: NAN}, {1.5: 0}, {True: 0}, {97: "1"}, [97], "x"]),
        ("seed", [1.5, "7", True, 2**64, -(2**63) - 1]),
        ("n", [0, -1, 1.0, None]),
        ("stop", ["", ["a", ""], 5, [5], [None], b"a", {"a": 1}, "\ud83d", ["ok", "\ude00"]]),
        ("stop_token_ids", [[-1], ["5"], [1.0], 5, "5", [True]]),
        ("ignore_eos", [1, None, "yes"]),
        ("logprobs", [-1, 21, 100, True, 2.0]),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, values: list[Any]) -> None:
    """B71, B75, B80, B83, B95: out of range, of another type, or not a number at all."""
    for value in values:
        with pytest.raises(ValueError, match=field.split("_id")[0]) as caught:
            SamplingParams(**{field: value})
        assert "\n" not in str(caught.value)
        str(caught.value).encode()


def test_an_unknown_name_is_refused() -> None:
    """B77: a misspelt parameter must not be taken for its default."""
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": 0, "temperature": 0, "top_k": 0, "top_p": 0, "min_p": 0, "seed": 0, "logprobs": 0},
        {"max_tokens": 10**12, "temperature": 2, "top_k": 10**6, "top_p": 1, "min_p": 1, "seed": 2**64 - 1},
        {"seed": -1, "presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {0: -100, 5: 100}, "logprobs": 20},
    ],
)
def test_values_on_the_edge_are_kept(values: dict[str, Any]) -> None:
    """B72: `value or default` turned every 0 into the default."""
    params = SamplingParams(**values)
    resolved = params.resolve({"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "max_new_tokens": 5})
    for name, value in values.items():
        assert getattr(params, name) == value
        assert getattr(resolved, name) == value


def test_numbers_of_any_kind() -> None:
    params = SamplingParams(top_k=np.int64(5), temperature=np.float32(0.5), stop_token_ids=np.array([1, 2]))  # type: ignore[arg-type]
    assert (params.top_k, params.temperature, params.stop_token_ids) == (5, 0.5, (1, 2))
    assert type(params.top_k) is int
    assert SamplingParams(top_k=-1).top_k == 0


def test_stop_is_a_string_or_several() -> None:
    """B82: null and [] mean none, and there is no limit to how many."""
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=list("abcde")).stop == tuple("abcde")  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == ()  # type: ignore[arg-type]


def test_min_tokens_beyond_max_tokens_names_both() -> None:
    with pytest.raises(ValueError, match=r"min_tokens is 5.* 3"):
        SamplingParams(max_tokens=3, min_tokens=5)


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_ids_outside_the_vocabulary(field: str) -> None:
    """B80: an unchecked index killed the engine or hit a neighbour's row."""
    make = {"logit_bias": lambda i: {i: 5.0}, "stop_token_ids": lambda i: [i]}[field]
    SamplingParams(**{field: make(263)}).validate(264)
    for bad in (264, 99999, 2**63):
        with pytest.raises(ValueError, match=rf"{field} has token id {bad}, .* 263"):
            SamplingParams(**{field: make(bad)}).validate(264)


def test_logit_bias_is_a_copy_that_cannot_change() -> None:
    given = {5: 1.0}
    params = SamplingParams(logit_bias=given)
    given[6] = 2.0
    assert dict(params.logit_bias) == {5: 1.0}
    for change in (lambda: params.logit_bias.update({1: 1}), lambda: params.logit_bias.__setitem__(1, 1.0)):  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="cannot be changed"):
            change()


def test_params_are_plain_data() -> None:
    params = SamplingParams(logit_bias={5: 1.0}, stop=("a",), seed=3)
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)
    assert hash(pickle.loads(pickle.dumps(params))) == hash(params)
    assert json.loads(json.dumps(dataclasses.asdict(params)))["logit_bias"] == {"5": 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def resolved(generation_config: dict[str, Any], **values: Any) -> SamplingParams:
    return SamplingParams(**values).resolve(generation_config)


def test_greedy_unless_the_model_or_the_user_samples() -> None:
    for config in ({}, {"do_sample": False}, {"temperature": 0.6, "top_p": 0.9}, {"do_sample": None}):
        assert resolved(config).greedy
        assert resolved(config, seed=7).greedy
        assert resolved(config, repetition_penalty=1.2).greedy
        for chosen in ({"temperature": 0.8}, {"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.1}):
            assert not resolved(config, **chosen).greedy
    assert not resolved({"do_sample": True}).greedy
    assert resolved({"do_sample": True}, temperature=0).greedy


def test_none_takes_the_models_value_and_then_the_default() -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None, "repetition_penalty": 1.1, "eos": 5}
    params = resolved(config, temperature=1.5)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.5, 20, 1.0, 0.0)
    assert params.repetition_penalty == 1.1
    assert resolved({}, top_k=3) == resolved({}, top_k=3, temperature=1, top_p=1, min_p=0, repetition_penalty=1)
    assert params.resolve({"temperature": 0.1}) == params, "nothing is left to fill"


def test_max_new_tokens_is_a_default_and_max_length_is_nothing() -> None:
    assert resolved({"max_length": 20}).max_tokens is None
    assert resolved({"max_new_tokens": 7, "max_length": 20}).max_tokens == 7
    assert resolved({"max_new_tokens": 7}, max_tokens=9).max_tokens == 9
    assert resolved({"max_new_tokens": 7}, max_tokens=0).max_tokens == 0
    assert resolved({"max_new_tokens": 7}, min_tokens=9).max_tokens == 9


@pytest.mark.parametrize("config", [{"top_p": 5}, {"temperature": "hot", "do_sample": True}, {"max_new_tokens": -1}])
def test_a_bad_value_of_the_models_is_named_as_such(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^generation_config\.json: "):
        resolved(config)


@pytest.mark.parametrize(
    ("values", "greedy"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 1e-10}, True),
        ({"temperature": 1e-5}, True),
        ({"temperature": 0.01}, False),
        ({"temperature": 1.0, "top_k": 1}, True),
        ({"temperature": 1.0, "top_p": 0}, True),
        ({"temperature": 1.0, "top_p": 1e-9}, False),
        ({"temperature": 1.0, "seed": 7}, False),
    ],
)
def test_what_is_greedy(values: dict[str, Any], greedy: bool) -> None:
    """B71, B78: tiny temperatures are, a seed is not."""
    assert resolved({}, **values).greedy is greedy


def test_choices_have_seeds_of_their_own() -> None:
    """B78: n answers to one request with a seed differ, and differ in the same way each time."""
    params = SamplingParams(n=3, seed=2**64 - 1, temperature=1.0)
    choices = [params.choice(index) for index in range(50)]
    assert len({choice.seed for choice in choices}) == 50
    assert choices == [params.choice(index) for index in range(50)]
    assert choices[0] == dataclasses.replace(params, n=1)
    assert SamplingParams(n=3).choice(2).seed is None
