"""RandomSource: random weights in a known shape, made at the speed of memory, for measuring speed only.

Knows no file. Values repeat a block of random numbers whose length is odd, so that no two rows are equal; they have the
size of trained weights (standard deviation 1/sqrt(K)), so that activations stay finite, and say nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flexdecode.checkpoints.shapes import SHAPES, tensor_shapes
from flexdecode.quantization.weights import Int4Weight, Int8Weight, Weight

_BLOCK = (1 << 20) - 1
_CODE_STD = math.sqrt((16**2 - 1) / 12)  # of codes uniform in 0 … 15
_INT8_STD = math.sqrt((255**2 - 1) / 12)  # of codes uniform in -127 … 127


class RandomSource:
    """`SHAPE`, `SHAPE@int4` or `SHAPE@int8`, SHAPE being one of shapes.SHAPES.

    Dense weights are bf16. With int4 or int8 every matrix is packed, embedding and head too: int4 in groups of 128
    (of 32 where 128 does not divide K), zeros 8, fp16 scales. Each tensor is a function of its name alone.
    """

    format: Literal["hf", "gguf", "random"] = "random"
    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]

    def __init__(self, spec: str) -> None:
        shape, _, weights = spec.partition("@")
        if shape not in SHAPES:
            raise ValueError(f"random:{spec}: unknown shape {shape!r}; known: {', '.join(SHAPES)}")
        if "@" in spec and weights not in ("int4", "int8"):
            raise ValueError(f"random:{spec}: unknown weights {weights!r}; they are @int4, @int8, or bf16 without @")
        self.path, self.generation_config = Path(f"random:{spec}"), {}
        self.config = dict(SHAPES[shape])
        self._weights = weights
        self._shapes = tensor_shapes(self.config)
        # Gemma's norms multiply by 1 + weight
        self._norm = 0.0 if self.config["model_type"] == "gemma3_text" else 1.0

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise ValueError(f"{self.path}: holds no tensor {name}")
        return self._shapes[name]

    def nbytes(self, name: str) -> int:
        shape = self.shape(name)
        elements = math.prod(shape)
        if len(shape) == 1 or not self._weights:
            return 2 * elements
        if self._weights == "int8":
            return elements + 4 * shape[0]
        return elements // 2 + 3 * (elements // _group(shape[1]))

    def read(self, name: str) -> Weight:
        shape = self.shape(name)
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith(".bias") else self._norm, dtype=torch.bfloat16)
        n, k = shape
        std = 1 / math.sqrt(k)
        if self._weights == "int8":
            codes = _tile(self._int8, name, n * k).view(n, k)
            return Int8Weight(codes, torch.full((n,), std / _INT8_STD))
        if self._weights == "int4":
            groups = (n, k // _group(k))
            codes = _tile(self._uint8, name, n * k // 2).view(n, k // 2)
            scales = torch.full(groups, std / _CODE_STD, dtype=torch.float16)
            return Int4Weight(codes, scales, torch.full(groups, 8, dtype=torch.uint8))
        return _tile(self._normal, name, n * k).view(n, k).mul_(std)

    @cached_property
    def _normal(self) -> Tensor:
        return torch.randn(_BLOCK, generator=_generator()).bfloat16()

    @cached_property
    def _uint8(self) -> Tensor:
        return torch.randint(0, 256, (_BLOCK,), dtype=torch.uint8, generator=_generator())

    @cached_property
    def _int8(self) -> Tensor:
        return torch.randint(-127, 128, (_BLOCK,), dtype=torch.int8, generator=_generator())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _group(k: int) -> int:
    return 128 if k % 128 == 0 else 32


def _tile(block: Tensor, name: str, size: int) -> Tensor:
    """`size` values of `block` repeated, beginning at a place that the name decides."""
    out = torch.empty(size, dtype=block.dtype)
    begin = zlib.crc32(name.encode()) % len(block)
    head = block[begin : begin + size]
    out[: len(head)] = head
    at = len(head)
    whole = (size - at) // len(block) * len(block)
    out[at : at + whole].view(-1, len(block)).copy_(block)
    out[at + whole :] = block[: size - at - whole]
    return out
