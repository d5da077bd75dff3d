"""Tiny checkpoints for evaluation, and a tokenizer that puts a BOS before a text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from flexdecode import LLM
from tests.checkpoints import BOS

TEXT = "The quick brown fox jumps over the lazy dog. Naïve café: 42 + 1 = 43! " * 5


def add_bos(d: Path) -> None:
    """From now on encoding puts one BOS in front."""
    path = str(d / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.save(path)


def in_steps_of(llm: LLM, tokens: int) -> LLM:
    """Prompts come in steps of so many tokens."""
    llm.engine.config = replace(llm.engine.config, prefill_chunk=tokens)
    return llm
