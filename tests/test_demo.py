"""The real model: SmolLM2-135M-Instruct from its GGUF, against transformers on the same dequantized weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flexdecode import LLM, SamplingParams
from flexdecode.checkpoints.demo import demo_path
from tests.oracles import expected

pytestmark = pytest.mark.slow

TOKENS = 200
CHATS = ["What is the capital of France?", "Write a short story about a lighthouse keeper."]
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    """transformers' own reading of the GGUF: its conversion of names, its permutation, fp32."""
    path = demo_path()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    llm = LLM("demo")
    return [list(llm._chat_ids([{"role": "user", "content": text}])) for text in CHATS]


@pytest.fixture(scope="module")
def answers(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers says, greedy, `TOKENS` tokens whatever they are."""
    return [_greedy(model, prompt) for prompt in prompts]


@torch.no_grad()
def _greedy(model: Any, prompt: list[int]) -> list[int]:
    """A loop of our own: generate() masks every padding id, and here that is the end of turn inside the prompts."""
    said: list[int] = []
    tokens, past = torch.tensor([prompt]), None
    for _ in range(TOKENS):
        out = model(tokens, past_key_values=past, use_cache=True)
        past = out.past_key_values
        said.append(int(out.logits[0, -1].argmax()))
        tokens = torch.tensor([[said[-1]]])
    return said


def test_fp32_says_the_same_200_tokens(prompts: list[list[int]], answers: list[list[int]]) -> None:
    llm = LLM("demo", dtype="fp32")
    for completion, answer in zip(llm.generate_batch(prompts, GREEDY), answers, strict=True):
        assert list(completion.token_ids) == answer


def test_fp32_logits_at_every_position(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> None:
    llm = LLM("demo", dtype="fp32")
    for prompt, answer in zip(prompts, answers, strict=True):
        sequence = prompt + answer
        error = (llm.logits(sequence) - expected(model, sequence)).abs().max()
        assert error < 1e-3  # logits reach 40


def test_bf16_follows_until_two_tokens_are_as_good(
    model: Any, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    """bf16 may leave the fp32 answer only where fp32 itself holds two tokens to be nearly as likely."""
    llm = LLM("demo", dtype="bf16")
    for prompt, answer in zip(prompts, answers, strict=True):
        said = list(llm.generate(prompt, GREEDY).token_ids)
        same = next((i for i, (a, b) in enumerate(zip(said, answer, strict=True)) if a != b), TOKENS)
        if same < TOKENS:
            logits = expected(model, prompt + answer[:same])[-1]
            assert logits[answer[same]] - logits[said[same]] < 0.5
        wanted = expected(model, prompt + answer)[len(prompt) - 1 : -1]
        got = llm.logits(prompt + answer)[len(prompt) - 1 : -1]
        agreement = (got.argmax(-1) == wanted.argmax(-1)).float().mean()
        assert agreement > 0.95


def test_bf16_is_as_near_to_fp32_as_transformers_own(
    model: Any, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    """Transformers in bf16 leaves its own fp32 answer too; our logits must be no further away than its."""
    path = demo_path()
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16).eval()
    llm = LLM("demo", dtype="bf16")
    for prompt, answer in zip(prompts, answers, strict=True):
        sequence = prompt + answer
        exact = expected(model, sequence)
        ours, its = ((got - exact).abs().mean() for got in (llm.logits(sequence), expected(theirs, sequence)))
        assert ours < 1.1 * its


def test_a_chat_answers_sensibly() -> None:
    # In bf16 two answers to this question are equally likely to the last bit; in fp32 they are not.
    llm = LLM("demo", dtype="float32")
    answer = llm.chat([{"role": "user", "content": CHATS[0]}], SamplingParams(max_tokens=40, temperature=0.0))
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"


def test_int4_stays_int4() -> None:
    held = LLM("demo").describe()["held_as"]
    assert any(kind.startswith("int4 g32") for kind in held)
