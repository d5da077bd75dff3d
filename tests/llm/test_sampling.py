"""Sampling, penalties and log-probabilities through a model whose distribution the test chose."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flexdecode import LLM, SamplingParams
from tests.checkpoints import VOCAB, dist
from tests.llm.asking import both_ways, load


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-10, 1e-5])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_temperature_zero_and_nearly_zero_are_greedy(temperature: float, dtype: str, tmp_path: Path) -> None:
    """B71: 12 / 1e-5 is infinite in fp16, and infinity minus infinity is NaN."""
    dist(tmp_path, {97: 0.5, 98: 0.3, 99: 0.2})
    answer = LLM(tmp_path, dtype=dtype).generate("<bos>", SamplingParams(max_tokens=20, temperature=temperature))
    assert answer.text == "a" * 20


def test_every_zero_has_its_meaning(tmp_path: Path) -> None:
    """B72: value or default turns a 0 into the default."""
    probs = {97: 0.25, 98: 0.25, 99: 0.25, 100: 0.25}
    dist(tmp_path, probs)
    llm = load(tmp_path)

    def texts(**options: Any) -> Counter[str]:
        return Counter(llm.generate("<bos>", SamplingParams(max_tokens=200, **options)).text)

    assert len(texts(temperature=1.0, top_p=0.0)) == 1
    assert len(texts(temperature=0.0)) == 1
    assert len(texts(temperature=1.0, top_k=0, min_p=0.0)) == 4
    first, again = (
        llm.generate("<bos>", SamplingParams(max_tokens=50, temperature=1.0, seed=0)).text for _ in range(2)
    )
    assert first == again
    other = llm.generate("<bos>", SamplingParams(max_tokens=50, temperature=1.0, seed=1)).text
    assert other != first


def test_samples_follow_the_distribution(tmp_path: Path) -> None:
    probs = {97: 0.5, 98: 0.3, 99: 0.2}
    dist(tmp_path, probs)
    text = load(tmp_path).generate("<bos>", SamplingParams(max_tokens=400, temperature=1.0, seed=3)).text
    counts = Counter(text)
    for token, p in probs.items():
        deviation = math.sqrt(400 * p * (1 - p))
        assert abs(counts[chr(token)] - 400 * p) < 5 * deviation


def test_seed_and_n(tmp_path: Path) -> None:
    """B78: choices differ from each other, the same call repeats them, and n with temperature 0 gives n equal ones."""
    dist(tmp_path, {97: 0.5, 98: 0.5})
    llm = load(tmp_path)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=7, n=3)
    first, second = ([c.text for c in llm.generate_batch(["<bos>"], params)] for _ in range(2))
    assert first == second
    assert len(set(first)) == 3
    assert first[0] == llm.generate("<bos>", SamplingParams(max_tokens=30, temperature=1.0, seed=7)).text
    equal = llm.generate_batch(["<bos>"], SamplingParams(max_tokens=5, temperature=0.0, n=3))
    assert len(equal) == 3
    assert len({c.text for c in equal}) == 1
    with pytest.raises(ValueError, match="n=3"):
        llm.generate("<bos>", params)


def test_penalties_and_what_they_count(tmp_path: Path) -> None:
    """B79: presence and frequency count the output only, repetition the prompt too."""
    dist(tmp_path, {97: 0.4, 98: 0.35, 99: 0.25})
    llm = load(tmp_path)

    def text(prompt: str, **options: Any) -> str:
        return llm.generate(prompt, SamplingParams(max_tokens=4, temperature=0.0, **options)).text

    assert text("aaaa") == "aaaa"
    assert text("aaaa", presence_penalty=0.2)[0] == "a"
    assert text("aaaa", frequency_penalty=0.2)[:2] == "ab"
    # log-probabilities are negative, so they are multiplied: a falls to log(.4) · 2
    assert text("aaaa", repetition_penalty=2.0)[0] == "b"
    assert text("b", repetition_penalty=1.01)[0] == "a"


def test_logit_bias_forces_and_bans(tmp_path: Path) -> None:
    """B80."""
    dist(tmp_path, {97: 0.6, 98: 0.4})
    llm = load(tmp_path)
    for bias, text in (({97: -100}, "bbb"), ({99: 100}, "ccc"), ({98: 1}, "bbb")):
        assert llm.generate("<bos>", SamplingParams(max_tokens=3, temperature=0, logit_bias=bias)).text == text
    for field, bad in (("logit_bias", {VOCAB: 5}), ("stop_token_ids", [99999])):
        with pytest.raises(ValueError, match=f"{field}.*{VOCAB - 1}"):
            llm.generate("<bos>", SamplingParams(max_tokens=3, **{field: bad}))


def test_logprobs_are_of_the_raw_logits(tmp_path: Path) -> None:
    dist(tmp_path, {97: 0.5, 98: 0.3, 99: 0.2})
    llm = load(tmp_path)
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3, logit_bias={98: 50}, stop="zz")
    answer = both_ways(llm, "<bos>", params)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids) == 4
    for entry in answer.logprobs:
        assert entry.token_id == 98
        assert entry.logprob == pytest.approx(math.log(0.3), abs=1e-3)
        assert [t for t, _ in entry.top] == [97, 98, 99]
        assert [p for _, p in entry.top] == pytest.approx([math.log(p) for p in (0.5, 0.3, 0.2)], abs=1e-3)
    chunks = list(llm.stream("<bos>", params))
    assert sum(len(chunk.logprobs or ()) for chunk in chunks) == 4


def test_defaults_come_from_generation_config(tmp_path: Path) -> None:
    dist(tmp_path, {97: 0.5, 98: 0.5})
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.7, "max_new_tokens": 12}')
    llm = load(tmp_path)
    assert len(set(llm.generate("<bos>").text)) == 2
    assert len(llm.generate("<bos>").text) == 12
    assert len(set(llm.generate("<bos>", SamplingParams(temperature=0.0)).text)) == 1
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "max_new_tokens": 100000}')
    plain = load(tmp_path, max_context=40)
    assert set(plain.generate("<bos>").text) == {"a"}
    assert len(plain.generate("<bos>").token_ids) == 39
