"""Log-probabilities in the formats of the two endpoints: beside the text, token by token, and always JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexdecode import LLM, SamplingParams
from flexdecode.generation.results import Completion, TokenLogprob
from flexdecode.serving.logprobs import chat_logprobs, completion_logprobs
from tests.checkpoints import EOT, puppet
from tests.llm.asking import GREEDY, load


def ask(llm: LLM, prompt: str = "<bos>", **params: Any) -> Completion:
    return llm.generate(prompt, SamplingParams(**{"logprobs": 2, "max_tokens": 30, **GREEDY, **params}))


def both(llm: LLM, completion: Completion) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    chat = chat_logprobs(completion, llm.tokenizer)
    text = completion_logprobs(completion, llm.tokenizer)
    assert chat is not None
    assert text is not None
    return json.loads(json.dumps(chat["content"], allow_nan=False)), json.loads(json.dumps(text, allow_nan=False))


@pytest.mark.parametrize("said", ["abc", "ab €😀z", "é"])
def test_bytes_join_to_the_text_and_offsets_point_into_it(said: str, tmp_path: Path) -> None:
    puppet(tmp_path, said)
    llm = load(tmp_path)
    completion = ask(llm)
    chat, text = both(llm, completion)
    assert completion.text == said
    assert bytes(byte for entry in chat for byte in entry["bytes"]).decode() == said
    assert len(chat) == len(said.encode()) == len(text["tokens"])  # the token that ended it is not listed
    wanted = [index for index, char in enumerate(said) for _ in char.encode()]
    assert text["text_offset"] == wanted
    for entry, token, logprob, top in zip(
        chat, text["tokens"], text["token_logprobs"], text["top_logprobs"], strict=True
    ):
        assert (entry["token"], entry["logprob"]) == (token, logprob)
        assert top[token] == logprob
        assert [one["logprob"] for one in entry["top_logprobs"]] == sorted(top.values(), reverse=True)[:2]
    assert len(set(text["tokens"])) == len(text["tokens"])  # pieces of characters do not all look alike


@pytest.mark.parametrize(("stop", "tokens"), [("abc", []), ("bc", ["a"]), ("c", ["a", "b"]), ("x", ["a", "b", "c"])])
def test_what_a_stop_string_cut_off_is_not_listed(stop: str, tokens: list[str], tmp_path: Path) -> None:
    puppet(tmp_path, "abc")
    llm = load(tmp_path)
    chat, text = both(llm, ask(llm, stop=stop))
    assert [entry["token"] for entry in chat] == text["tokens"] == tokens


def test_a_cut_by_the_budget_keeps_every_token(tmp_path: Path) -> None:
    puppet(tmp_path, "a€b")
    llm = load(tmp_path)
    chat, _ = both(llm, ask(llm, max_tokens=3))
    assert [entry["bytes"] for entry in chat] == [[97], [0xE2], [0x82]]


def test_an_end_in_the_midst_of_a_character(tmp_path: Path) -> None:
    puppet(tmp_path, [0x61, 0xE2])
    llm = load(tmp_path)
    completion = ask(llm)
    assert completion.text == "a\ufffd"
    chat, text = both(llm, completion)
    assert [entry["bytes"] for entry in chat] == [[97], [0xE2]]
    assert text["tokens"] == ["a", "bytes:\\xe2"]


def test_tokens_without_text_are_named_by_their_id(tmp_path: Path) -> None:
    puppet(tmp_path, [65, 262, EOT, 66])
    llm = load(tmp_path)
    completion = ask(llm)
    chat, text = both(llm, completion)
    assert completion.text == "AB"
    assert text["tokens"] == ["A", "token_id:262", "<eot>", "B"]
    assert [entry["bytes"] for entry in chat] == [[65], None, None, [66]]
    assert text["text_offset"] == [0, 1, 1, 1]


def test_a_token_that_cannot_come_has_a_finite_number(tmp_path: Path) -> None:
    puppet(tmp_path, "ab")
    llm = load(tmp_path)
    entry = TokenLogprob(98, -math.inf, ((97, 0.0), (98, -math.inf)))
    chat, text = both(llm, replace(ask(llm, max_tokens=1), logprobs=(entry,)))
    assert [one["logprob"] for one in chat[0]["top_logprobs"]] == [0.0, -9999.0]
    assert text["token_logprobs"] == [-9999.0]
    assert text["top_logprobs"] == [{"a": 0.0, "b": -9999.0}]


def test_the_chosen_token_is_among_the_top_ones_of_a_text_even_with_none_asked_for(tmp_path: Path) -> None:
    puppet(tmp_path, "ab")
    llm = load(tmp_path)
    chat, text = both(llm, ask(llm, logprobs=0))
    assert [list(top) for top in text["top_logprobs"]] == [["a"], ["b"]]
    assert [entry["top_logprobs"] for entry in chat] == [[], []]


def test_none_asked_for_none_told(tmp_path: Path) -> None:
    puppet(tmp_path, "ab")
    completion = ask(load(tmp_path), logprobs=None)
    assert chat_logprobs(completion, None) is None
    assert completion_logprobs(completion, None) is None


def test_without_a_tokenizer_ids_tell_all(tmp_path: Path) -> None:
    puppet(tmp_path, "ab")
    (tmp_path / "tokenizer.json").unlink()
    llm = load(tmp_path)
    completion = llm.generate([256], SamplingParams(logprobs=1, max_tokens=2, temperature=0.0))
    chat, text = both(llm, completion)
    assert text["tokens"] == ["token_id:97", "token_id:98"]
    assert [entry["bytes"] for entry in chat] == [None, None]
