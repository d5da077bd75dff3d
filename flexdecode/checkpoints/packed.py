"""What the readers of packed layouts share: the stored source beneath them, and one packed matrix.

Knows no layout: `awq` and `compressed` find the packed matrices, `quantized` presents them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from flexdecode.checkpoints.source import Source
from flexdecode.config import QuantConfig
from flexdecode.quantization.weights import Int4Weight, Int8Weight

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLOAT_REMEDY = "use a bf16 or fp16 checkpoint and `flexdecode quantize`"


class StoredSource(Source, Protocol):
    """A source of plain tensors which also tells dtypes and files without reading."""

    def dtype(self, name: str) -> torch.dtype: ...

    def file(self, name: str) -> Path: ...

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Packed:
    """A quantized matrix: its logical shape [N, K], its bytes as `load` returns it, and the stored names it uses up."""

    shape: tuple[int, int]
    nbytes: int
    parts: tuple[str, ...]
    quantization: QuantConfig
    load: Callable[[], Int4Weight | Int8Weight]


def int4_bytes(n: int, k: int, groups: int, scales: torch.dtype, zero_bytes: int) -> int:
    """Bytes of an Int4Weight: fp16 scales stay, others are held in fp32."""
    return n * k // 2 + n * groups * ((2 if scales == torch.float16 else 4) + zero_bytes)


def require_float(source: StoredSource, name: str) -> torch.dtype:
    """The dtype of a tensor of scales. Raises ValueError when it is no float."""
    dtype = source.dtype(name)
    if dtype not in FLOATS:
        raise ValueError(f"{source.file(name)}: tensor {name} is {dtype}, where scales are fp16, bf16 or fp32")
    return dtype
