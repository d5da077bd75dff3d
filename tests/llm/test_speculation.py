"""Guessed tokens through LLM: several come in one step, and text, ends and figures are as if they came one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flexdecode import LLM, SamplingParams
from flexdecode.generation.speculative import Speculation
from flexdecode.jobs import Job
from tests.checkpoints import EOS, EOT, puppet, tiny
from tests.llm.asking import GREEDY, both_ways, distinct, load
from tests.oracles import ids


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many guesses as there may be, whatever they cost."""
    monkeypatch.setattr(Speculation, "choose", lambda self, beside=0: 15)


@pytest.fixture
def say(tmp_path: Path) -> Any:
    """A model that says a text, with itself for a draft: all of its guesses are right."""

    def made(text: Any, **options: Any) -> LLM:
        puppet(tmp_path, text, **options)
        return load(tmp_path, speculate=tmp_path)

    return made


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("DEFG", "ABC"),
        ("HIJ", "ABCDEFG"),
        (["DEX", "EFG"], "ABCD"),
        ("XYZ", "ABCDEFGHIJ"),
        ("ABCDEFGHIJ", ""),
        (["x", "GH"], "ABCDEF"),
    ],
)
def test_stop_strings_inside_a_step(stop: Any, text: str, say: Any) -> None:
    answer = both_ways(say("ABCDEFGHIJ"), "<bos>", SamplingParams(max_tokens=50, stop=stop, logprobs=1, **GREEDY))
    assert (answer.text, answer.finish_reason) == (text, "stop")
    assert answer.logprobs is not None
    assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
    assert answer.stats.accepted_tokens > 0
    assert answer.stats.new_tokens == len(answer.token_ids)


@pytest.mark.parametrize(("stop", "text"), [("ZZZ", "ab €😀z"), ("€", "ab "), ("😀z", "ab €")])
def test_characters_of_several_tokens_inside_a_step(stop: str, text: str, say: Any) -> None:
    llm = say(distinct("ab €😀z"))
    assert both_ways(llm, "<bos>", SamplingParams(max_tokens=50, stop=stop, **GREEDY)).text == text


@pytest.mark.parametrize(
    ("options", "reason", "text"),
    [
        ({"max_tokens": 2}, "length", "ab"),
        ({"max_tokens": 3}, "length", "abc"),
        ({"max_tokens": 4}, "stop", "abc"),
        ({"max_tokens": 10, "stop": "b"}, "stop", "a"),
        ({"max_tokens": 10, "stop_token_ids": [ord("b")]}, "stop", "a"),
        ({"max_tokens": 10, "stop": "z"}, "stop", "abc"),
        ({"max_tokens": 10, "stop": "bc", "min_tokens": 3}, "stop", "abc"),
        ({}, "stop", "abc"),
    ],
)
def test_finish_reasons(options: dict[str, Any], reason: str, text: str, say: Any) -> None:
    answer = both_ways(say("abc"), "<bos>", SamplingParams(**options, **GREEDY))
    assert (answer.finish_reason, answer.text) == (reason, text)


def test_ends_that_are_ignored_or_too_early(say: Any) -> None:
    llm = say("abc", eos=[EOS, EOT], end=EOT)
    answer = both_ways(llm, "<bos>", SamplingParams(max_tokens=10, ignore_eos=True, **GREEDY))
    assert (len(answer.token_ids), answer.finish_reason) == (10, "length")
    answer = both_ways(llm, "<bos>", SamplingParams(max_tokens=10, min_tokens=5, **GREEDY))
    assert not {EOS, EOT} & set(answer.token_ids[:4])


def test_the_context_is_the_end(tmp_path: Path) -> None:
    puppet(tmp_path, "a", end=97)
    for speculate in ("lookup", tmp_path):
        llm = load(tmp_path, max_context=32, speculate=speculate)
        for prompt in (30, 16, 1):
            answer = both_ways(llm, [97] * prompt, SamplingParams(ignore_eos=True, **GREEDY))
            assert (len(answer.token_ids), answer.finish_reason) == (32 - prompt, "length")


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("way", [{}, {"temperature": 1.0, "seed": 5}, {"repetition_penalty": 1.2, "n": 3}], ids=str)
def test_batches_streams_and_jobs_answer_alike(family: str, way: dict[str, Any], tmp_path: Path) -> None:
    tiny(tmp_path, family, num_hidden_layers=2)
    params = SamplingParams(**({"max_tokens": 40, "ignore_eos": True, **GREEDY} | way))
    prompts = [ids(20 + 30 * n, seed=n) for n in range(3)]
    wanted = [answer.token_ids for answer in load(tmp_path).generate_batch(prompts, params)]
    for speculate in ("lookup", tmp_path):
        llm = load(tmp_path, speculate=speculate)
        answers = llm.generate_batch(prompts, params)
        assert [answer.token_ids for answer in answers] == wanted
        jobs = [Job(params, (prompt,), key=i) for i, prompt in enumerate(prompts)]
        done = {finished.job.key: finished.completions for finished in llm.complete(jobs)}
        assert [answer.token_ids for i in range(3) for answer in done[i]] == wanted
        if params.n == 1:
            both_ways(llm, prompts[1], params)
        assert llm.engine.cache.lengths == {}


def test_an_answer_that_is_left_early(say: Any) -> None:
    llm = say("ABCDEFGHIJ")
    stream = llm.stream("<bos>", SamplingParams(max_tokens=50, **GREEDY))
    for _ in range(2):
        next(stream)
    stream.close()
    assert llm.engine.cache.lengths == {}
    assert not llm.engine.busy


def test_explained_steps_are_of_one_token(tmp_path: Path) -> None:
    tiny(tmp_path, num_hidden_layers=1)
    llm = load(tmp_path, speculate="lookup")
    assert llm.describe()["speculate"] == "lookup"
    assert llm.explain(60, measure=True).step_seconds
    assert llm.engine.computed_tokens == 59  # the last one is never read


def test_a_draft_must_speak_the_same_language(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for d, vocab in ((one, 264), (other, 300)):
        d.mkdir()
        tiny(d, vocab_size=vocab, num_hidden_layers=1)
    padded = load(one, speculate=other)  # padded further, with the same tokenizer
    params = SamplingParams(max_tokens=20, ignore_eos=True, **GREEDY)
    assert padded.generate(ids(9), params).token_ids == load(one).generate(ids(9), params).token_ids
    for d in (one, other):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (d / name).unlink()
    with pytest.raises(ValueError, match=r"other has a vocabulary of 300 and .*one one of 264: a draft needs the same"):
        load(one, speculate=other)
    with pytest.raises(ValueError, match="nowhere"):
        load(one, speculate=str(tmp_path / "nowhere"))


def test_where_tokens_see_later_ones_it_is_refused_before_any_work(tmp_path: Path) -> None:
    tiny(tmp_path, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"nothing can be speculated under causal\(\) \| sinks\(9\)"):
        load(tmp_path, mask="prefix_lm(9)", replace_mask=True, speculate=tmp_path / "nowhere")
