"""Every family against transformers: tiny random checkpoints, fp32, logits at every position."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexdecode import LLM, SamplingParams
from flexdecode.families import FAMILIES as KNOWN
from tests.checkpoints import FAMILIES, tiny
from tests.oracles import assert_close, expected, ids

TOKENS = 60  # well beyond the window of 16


def test_every_family_is_tested() -> None:
    assert set(KNOWN) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_whole_in_chunks_and_token_by_token(family: str, tmp_path: Path) -> None:
    model = tiny(tmp_path, family)
    llm = LLM(tmp_path, dtype="fp32")
    prompt = ids(TOKENS)
    wanted = expected(model, prompt)
    for chunk in (None, 17, 1):
        assert_close(llm.logits(prompt, chunk), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_backend_agrees(family: str, tmp_path: Path) -> None:
    model = tiny(tmp_path, family, seed=1)
    llm = LLM(tmp_path, dtype="fp32", attention="reference")
    prompt = ids(TOKENS, seed=2)
    assert_close(llm.logits(prompt, 23), expected(model, prompt))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "smollm3", "granite", "qwen2"])
def test_tied_and_untied_heads(family: str, tied: bool, tmp_path: Path) -> None:
    model = tiny(tmp_path, family, tie_word_embeddings=tied)
    prompt = ids(30)
    assert_close(LLM(tmp_path, dtype="fp32").logits(prompt), expected(model, prompt))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_is_transformers(family: str, tmp_path: Path) -> None:
    """Decoding goes through the cache one token at a time, past the window and past a page."""
    model = tiny(tmp_path, family, seed=3)
    prompt = ids(40, seed=4)
    llm = LLM(tmp_path, dtype="fp32")
    got = llm.generate(prompt, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)).token_ids
    sequence = list(prompt)
    for token in got:
        logits = expected(model, sequence)[-1]
        # Two logits may lie closer together than fp32 tells apart; then either is right.
        assert logits[token] >= logits.max() - 1e-3
        sequence.append(token)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_close(family: str, tmp_path: Path) -> None:
    model = tiny(tmp_path, family, gain=1.0)
    prompt = ids(TOKENS)
    wanted = expected(model, prompt)
    got = LLM(tmp_path, dtype="bf16").logits(prompt)
    assert torch.isfinite(got).all()
    # bf16 keeps 8 bits: a few per cent of the logits' spread over four layers.
    assert (got - wanted).abs().mean() < 0.05 * wanted.std()
