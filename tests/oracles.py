"""What results are held against: transformers' own model, position by position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from flexdecode import LLM


def ids(count: int, seed: int = 1, vocab: int = 256) -> list[int]:
    """Random token ids, the same every time."""
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def oracle(d: str | Path) -> Any:
    """transformers' reading of a checkpoint: fp32, eager attention."""
    return AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def expected(model: Any, token_ids: list[int]) -> Tensor:
    """fp32 logits [tokens, vocab]."""
    logits: Tensor = model(torch.tensor([token_ids])).logits[0].float()
    return logits


def assert_same_logits(d: str | Path, model: Any | None = None, tokens: int = 60, atol: float = 1e-4) -> LLM:
    """Our fp32 logits of the checkpoint in `d` are transformers' (relative to the size of the largest)."""
    llm = LLM(d, dtype="fp32")
    prompt = ids(tokens)
    wanted = expected(oracle(d) if model is None else model, prompt)
    assert_close(llm.logits(prompt), wanted, atol)
    return llm


def assert_close(got: Tensor, wanted: Tensor, atol: float = 1e-4) -> None:
    """Within `atol`, or within atol of the largest value where that is above 1."""
    assert got.shape == wanted.shape
    error = (got - wanted).abs().max().item()
    limit = atol * max(1.0, wanted.abs().max().item())
    assert error <= limit, f"largest error {error:.3g}, allowed {limit:.3g}"
