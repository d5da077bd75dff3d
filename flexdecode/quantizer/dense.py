"""DenseSource: a checkpoint whose integer matrices are read as floats, and which remembers what dtype each had."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flexdecode.checkpoints.source import Source


class DenseSource:
    """`inner`, dequantized to fp32 where it holds integers.

    `dtypes` has, for every tensor read so far, the dtype in which it should be saved: its own, and `fallback` for what
    was dequantized and for every tensor of a GGUF file, whose converters widen small tensors.
    """

    format: Literal["hf", "gguf", "random"]
    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]

    def __init__(self, inner: Source, fallback: torch.dtype) -> None:
        self.format, self.path = inner.format, inner.path
        self.config, self.generation_config = inner.config, inner.generation_config
        self._inner, self._fallback = inner, fallback
        self.dtypes: dict[str, torch.dtype] = {}
        self.dequantized = 0  # matrices that were integers

    def names(self) -> Collection[str]:
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def nbytes(self, name: str) -> int:
        return self._inner.nbytes(name)

    def read(self, name: str) -> Tensor:
        weight = self._inner.read(name)
        if isinstance(weight, Tensor):
            own = weight.dtype if self.format != "gguf" or not weight.is_floating_point() else self._fallback
            self.dtypes[name] = own
            return weight
        if name not in self.dtypes:
            self.dequantized += 1
        self.dtypes[name] = self._fallback
        return weight.dequantize().view(self._inner.shape(name))

    def rows(self, name: str, index: Tensor) -> Tensor:
        """fp32 rows of a matrix; of an integer one no others are dequantized."""
        weight = self._inner.read(name)
        return weight[index].to(torch.float32) if isinstance(weight, Tensor) else weight.rows(index).dequantize()
