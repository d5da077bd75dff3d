"""How the tests of LLM ask: in fp32, greedily, and both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexdecode import LLM, SamplingParams
from flexdecode.generation.results import Chunk, Completion

GREEDY = {"temperature": 0.0}


def load(d: Path, **options: Any) -> LLM:
    return LLM(d, dtype="fp32", **options)


def joined(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def both_ways(llm: LLM, prompt: str | list[int], params: SamplingParams) -> Completion:
    """The completion, after checking that the stream says exactly the same."""
    whole = llm.generate(prompt, params)
    chunks = list(llm.stream(prompt, params))
    assert joined(chunks) == whole.text
    assert tuple(t for chunk in chunks for t in chunk.token_ids) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == whole.finish_reason
    assert chunks[-1].stats is not None
    return whole


def distinct(text: str) -> list[int]:
    """The bytes of `text`, each of which a puppet can say once."""
    encoded = list(text.encode())
    assert len(set(encoded)) == len(encoded)
    return encoded
