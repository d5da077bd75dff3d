"""The one protocol through which a checkpoint is read, and the door that opens one.

A source names its tensors, tells their shapes without reading them, and reads them one at a time. It knows formats,
not models: what a tensor is for is said in `families`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from flexdecode.quantization.weights import Weight


class Source(Protocol):
    """A checkpoint, opened. Reading is lazy: opening touches headers only."""

    format: Literal["hf", "gguf", "random"]
    path: Path  # the directory or file, for messages and for the tokenizer
    config: Mapping[str, Any]  # config.json ("hf", "random"), or the GGUF metadata (key -> Python value)
    generation_config: Mapping[str, Any]  # generation_config.json, {} where there is none

    def names(self) -> Collection[str]:
        """Every logical tensor. A quantized matrix counts as one, under its float name (`….q_proj.weight`)."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The logical shape ([N, K] for a quantized matrix). Raises ValueError naming the file when absent."""

    def nbytes(self, name: str) -> int:
        """Bytes that the tensor takes in memory as `read` returns it."""

    def read(self, name: str) -> Weight:
        """The tensor in its stored dtype, or the canonical integer weight."""
