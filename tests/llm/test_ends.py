"""When and why an answer ends: ends of turn, stop strings, budgets, the context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flexdecode import SamplingParams
from tests.checkpoints import EOS, EOT, puppet
from tests.llm.asking import GREEDY, both_ways, distinct, load


@pytest.mark.parametrize("where", ["generation_config", "config list", "config int", "tokenizer"])
def test_the_end_of_turn_is_found_wherever_it_is_named(where: str, tmp_path: Path) -> None:
    """B81: a list in generation_config.json was ignored, or replaced the tokenizer's own."""
    eos: Any = {"generation_config": 5, "config list": [EOS, EOT], "config int": EOT, "tokenizer": 5}[where]
    end = EOS if where == "tokenizer" else EOT
    puppet(tmp_path, "abc", eos=eos, end=end)
    if where == "generation_config":
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{EOS}, {EOT}]}}')
    else:
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
    answer = both_ways(load(tmp_path), "<bos>", SamplingParams(max_tokens=20, **GREEDY))
    assert (answer.text, answer.finish_reason) == ("abc", "stop")
    assert answer.token_ids[-1] == end


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("DEFG", "ABC"),
        ("HIJ", "ABCDEFG"),
        (["DEX", "EFG"], "ABCD"),
        ("XYZ", "ABCDEFGHIJ"),
        ("HIJK", "ABCDEFGHIJ"),
        ("ABCDEFGHIJ", ""),
        ([], "ABCDEFGHIJ"),
        (["x", "y", "z", "w", "GH"], "ABCDEF"),
    ],
)
def test_stop_strings_across_tokens(stop: Any, text: str, tmp_path: Path) -> None:
    """B82: one token a byte, so every stop string spans tokens; no chunk may hold a part of a match."""
    puppet(tmp_path, "ABCDEFGHIJ")
    answer = both_ways(load(tmp_path), "<bos>", SamplingParams(max_tokens=50, stop=stop, **GREEDY))
    assert (answer.text, answer.finish_reason) == (text, "stop")


@pytest.mark.parametrize(("stop", "text"), [("ZZZ", "ab €😀z"), ("€", "ab "), ("😀z", "ab €")])
def test_stop_strings_among_multibyte_characters(stop: str, text: str, tmp_path: Path) -> None:
    """B83, B86: the hold-back cut a character in two."""
    puppet(tmp_path, distinct("ab €😀z"))
    assert both_ways(load(tmp_path), "<bos>", SamplingParams(max_tokens=50, stop=stop, **GREEDY)).text == text


@pytest.mark.parametrize(
    ("options", "reason", "text"),
    [
        ({"max_tokens": 2}, "length", "ab"),
        ({"max_tokens": 3}, "length", "abc"),
        ({"max_tokens": 4}, "stop", "abc"),
        ({"max_tokens": 10}, "stop", "abc"),
        ({"max_tokens": 10, "stop": "b"}, "stop", "a"),
        ({"max_tokens": 0}, "length", ""),
        ({"max_tokens": 10, "stop_token_ids": [ord("b")]}, "stop", "a"),
        ({"max_tokens": 10, "stop": "z"}, "stop", "abc"),
        ({}, "stop", "abc"),
    ],
)
def test_finish_reasons(options: dict[str, Any], reason: str, text: str, tmp_path: Path) -> None:
    """B84: null on a natural end, or stop when the budget ran out."""
    puppet(tmp_path, "abc")
    answer = both_ways(load(tmp_path), "<bos>", SamplingParams(**options, **GREEDY))
    assert (answer.finish_reason, answer.text) == (reason, text)


def test_ignore_eos_and_min_tokens(tmp_path: Path) -> None:
    """B85: ends named by generation_config were added to the request's own and so never ignored."""
    puppet(tmp_path, "abc", eos=[EOS, EOT], end=EOT)
    llm = load(tmp_path)
    answer = both_ways(llm, "<bos>", SamplingParams(max_tokens=10, ignore_eos=True, **GREEDY))
    assert (len(answer.token_ids), answer.finish_reason) == (10, "length")
    answer = both_ways(llm, "<bos>", SamplingParams(max_tokens=10, min_tokens=5, **GREEDY))
    assert len(answer.token_ids) >= 5
    assert not {EOS, EOT} & set(answer.token_ids[:4])
    stopped = both_ways(llm, "<bos>", SamplingParams(max_tokens=10, min_tokens=3, stop="b", **GREEDY))
    assert stopped.text.startswith("abc")


def test_generation_ends_at_the_context(tmp_path: Path) -> None:
    """B46, B48: prompt and new tokens together are at most max_context; the last one needs no room in the cache."""
    puppet(tmp_path, "a", end=97)
    llm = load(tmp_path, max_context=32)
    endless = {"ignore_eos": True, **GREEDY}
    for prompt, new in ((31, 1), (30, 2), (1, 31), (16, 16)):
        answer = both_ways(llm, [97] * prompt, SamplingParams(max_tokens=new, **endless))
        assert (len(answer.token_ids), answer.finish_reason) == (new, "length")
        open_ended = llm.generate([97] * prompt, SamplingParams(**endless))
        assert (len(open_ended.token_ids), open_ended.finish_reason) == (32 - prompt, "length")
    for prompt, new in ((32, 1), (31, 2), (1, 32), (1, 10**12)):
        with pytest.raises(ValueError, match=rf"{prompt} prompt tokens and max_tokens={new} .*32"):
            llm.generate([97] * prompt, SamplingParams(max_tokens=new, **endless))
    with pytest.raises(ValueError, match=r"33 tokens.*32"):
        llm.generate([97] * 33, SamplingParams(**endless))
    assert llm.generate([97] * 32, SamplingParams(**endless)).finish_reason == "length"
