"""Sessions bring requests from prompts to last tokens, never reuse a prompt, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexdecode import LLM
from flexdecode.benchmark.session import Session, random_keys
from tests.checkpoints import tiny


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    tiny(tmp_path)
    return LLM(tmp_path)


def test_a_batch_is_prefilled_decoded_and_ends(llm: LLM) -> None:
    free = llm.engine.cache.free_tokens()
    with Session(llm.engine, 40, 5, batch=3) as session:
        session.until_first_tokens()
        assert all(request.output_ids for request in session.requests)
        left = session.steps_left
        assert 1 <= left <= 4
        session.until_ended()
        assert [len(request.output_ids) for request in session.requests] == [5] * 3
    assert not llm.engine.busy
    assert llm.engine.cache.free_tokens() == free


def test_no_two_prompts_are_alike(llm: LLM) -> None:
    with Session(llm.engine, 40, 1, batch=2) as first, Session(llm.engine, 40, 1) as second:
        prompts = [request.prompt_ids for request in (*first.requests, *second.requests)]
        assert len(set(prompts)) == 3
    assert not llm.engine.busy, "what has not begun is aborted, too"


@pytest.mark.parametrize(
    ("tokens", "batch", "words"),
    [((256, 1), 1, "context ends at 256"), ((100, 100), 70, "70 sequences of 100 \\+ 100 tokens need 17920 tokens")],
)
def test_what_does_not_fit_is_refused_and_nothing_runs(
    llm: LLM, tokens: tuple[int, int], batch: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Session(llm.engine, *tokens, batch)
    assert not llm.engine.busy


def test_logits_that_are_none_are_an_error(llm: LLM) -> None:
    with Session(llm.engine, 10, 5) as session:
        with torch.inference_mode():
            llm.engine.model.norm.weight.fill_(float("nan"))
        with pytest.raises(ValueError, match="NaN in 264"):
            session.until_ended()
    assert not llm.engine.busy


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_random_keys_fill_the_cache_and_the_model_is_itself_again(family: str, tmp_path: Path) -> None:
    tiny(tmp_path, family)
    llm, prompt = LLM(tmp_path), [5, 6, 7, 8]
    before = llm.logits(prompt)
    cache = llm.engine.cache
    for layer in range(len(cache.layers)):
        cache.kv(layer).k_CSD.zero_()
    with random_keys(llm.engine.model), Session(llm.engine, 100, 3) as session:
        session.until_first_tokens()
        assert list(cache.lengths.values()) == [100]
        kept = 16 if family == "gemma3_text" else 100
        for layer in range(len(cache.layers)):
            written = cache.kv(layer).k_CSD.float()
            assert kept <= int((written != 0).any(-1)[0].sum())
            assert 0.8 < float(written[written != 0].std()) < 1.2
        session.step()
    torch.testing.assert_close(llm.logits(prompt), before)
    assert "forward" not in vars(llm.engine.model)
