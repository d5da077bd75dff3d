"""GgufSource: a GGUF file, whole or split, as named tensors.

Knows the types, not the models: names are GGUF's own, nothing is renamed or permuted (families do that), and metadata
is given as it stands. Q4_0 and Q4_1 become Int4Weight and MXFP4 becomes Fp4Weight, exactly; the other quantized types
become a dense matrix.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from flexdecode.checkpoints.files import as_dtype, map_bytes
from flexdecode.checkpoints.gguf_header import AGAIN, GgufTensor, read_header
from flexdecode.checkpoints.int4 import from_offsets
from flexdecode.quantization.weights import Fp4Weight, Int4Weight, Weight

_PLAIN = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_INT4 = ("Q4_0", "Q4_1")
_SLAB = 1 << 20  # elements dequantized at once
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufSource:
    """A .gguf file; of a split file any part may be given, and all are read.

    `dense_dtype` is what matrices become that are quantized in a type other than those three (Q8_0, K-quants …):
    they are computed in fp32 and rounded once. 1-D tensors in those become dense too, being no matrices; those
    of three dimensions keep their logical shape and are read as one matrix, the rows of all below each other.
    Raises ValueError (one line, naming file, tensor and remedy) for a file that cannot be read in full.
    """

    format: Literal["hf", "gguf", "random"] = "gguf"
    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]

    def __init__(self, path: Path | str, *, dense_dtype: torch.dtype = torch.bfloat16) -> None:
        files = _parts(Path(path))
        self.path, self.generation_config, self._dense = files[0], {}, dense_dtype
        self.config, self._tensors = read_header(files[0])
        count = self.config.get("split.count", 1)
        if count != len(files) and (count > 1 or len(files) > 1):
            raise ValueError(
                f"{self.path}: split.count says {count} parts, and the name says {len(files)}; give every part its "
                "original name, NAME-00001-of-0000N.gguf"
            )
        for file in files[1:]:
            for name, tensor in read_header(file)[1].items():
                if self._tensors.setdefault(name, tensor) is not tensor:
                    raise ValueError(f"{file}: tensor {name} is also in {self._tensors[name].file.name}; {AGAIN}")
        total = self.config.get("split.tensors.count", len(self._tensors))
        if len(files) > 1 and total != len(self._tensors):
            raise ValueError(f"{self.path}: the parts hold {len(self._tensors)} tensors of {total}; {AGAIN}")
        _refuse_unreadable(self._tensors)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def type_name(self, name: str) -> str:
        """GGUF's name of the stored type, as `Q4_1`."""
        return str(self._tensor(name).type.name)

    def nbytes(self, name: str) -> int:
        tensor = self._tensor(name)
        elements = math.prod(tensor.shape)
        if tensor.type.name in _PLAIN:
            return tensor.nbytes
        if _is_int4(tensor):
            return elements // 2 + elements // 32 * (3 if tensor.type.name == "Q4_0" else 6)
        if _is_fp4(tensor):
            return tensor.nbytes
        return elements * self._dense.itemsize

    def read(self, name: str) -> Weight:
        tensor = self._tensor(name)
        stored = map_bytes(tensor.file, tensor.offset, tensor.nbytes)
        if tensor.type.name in _PLAIN:
            return as_dtype(stored, _PLAIN[tensor.type.name], tensor.shape)
        if _is_int4(tensor):
            decode = decode_q4_0 if tensor.type.name == "Q4_0" else decode_q4_1
            return decode(stored, tensor.shape[-1])
        if _is_fp4(tensor):
            return decode_mxfp4(stored, tensor.shape[-1])
        return _dense(stored, tensor, self._dense)

    def _tensor(self, name: str) -> GgufTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise ValueError(f"{self.path}: holds no tensor {name}") from None


def decode_q4_0(blocks: Tensor, columns: int) -> Int4Weight:
    """uint8 blocks of 32 elements (fp16 d, 16 bytes of codes): w = (code - 8)·d."""
    codes_NB, d_NG = _codes(blocks, 9, columns)
    zeros_NG = torch.full(d_NG.shape, 8, dtype=torch.uint8)
    return Int4Weight(codes_NB, d_NG.contiguous(), zeros_NG)


def decode_q4_1(blocks: Tensor, columns: int) -> Int4Weight:
    """uint8 blocks of 32 elements (fp16 d, fp16 m, 16 bytes of codes): w = code·d + m."""
    codes_NB, d_NG = _codes(blocks, 10, columns)
    m_NG = blocks.view(torch.float16).view(-1, columns // 32, 10)[..., 1]
    return from_offsets(codes_NB, d_NG, m_NG)


def decode_mxfp4(blocks: Tensor, columns: int) -> Fp4Weight:
    """uint8 blocks of 32 elements (an exponent, 16 bytes of e2m1 codes): w = value(code) · 2 ** (exponent - 127)."""
    blocks_M17 = blocks.view(-1, 17)
    codes_M2I = torch.empty(blocks_M17.shape[0], 2, 8, dtype=torch.uint8)
    slab = _SLAB // 32
    for m in range(0, blocks_M17.shape[0], slab):
        code = blocks_M17[m : m + slab, 1:]  # byte j holds elements j and j + 16
        codes_M2I[m : m + slab, 0] = (code[:, 0::2] & 0x0F) | (code[:, 1::2] << 4)
        codes_M2I[m : m + slab, 1] = (code[:, 0::2] >> 4) | (code[:, 1::2] & 0xF0)
    return Fp4Weight(codes_M2I.view(-1, columns // 2), blocks_M17[:, 0].contiguous().view(-1, columns // 32))


def _codes(blocks: Tensor, words: int, columns: int) -> tuple[Tensor, Tensor]:
    """Canonical codes [N, K/2] and the first fp16 of every block [N, K/32], of blocks of `words` 16-bit words.

    Byte j of a block holds element j in its low nibble and j + 16 in its high one; so one 16-bit word holds the two
    adjacent pairs (2i, 2i+1) and (2i+16, 2i+17).
    """
    blocks_MW = blocks.view(torch.int16).view(-1, words)
    codes_M2I = torch.empty(blocks_MW.shape[0], 2, 8, dtype=torch.uint8)
    slab = _SLAB // 32
    for m in range(0, blocks_MW.shape[0], slab):
        word = blocks_MW[m : m + slab, words - 8 :].contiguous()
        codes_M2I[m : m + slab, 0] = (word & 0x0F) | ((word >> 4) & 0xF0)
        codes_M2I[m : m + slab, 1] = ((word >> 4) & 0x0F) | ((word >> 8) & 0xF0)
    first_NG = blocks.view(torch.float16).view(-1, columns // 32, words)[..., 0]
    return codes_M2I.view(-1, columns // 2), first_NG


def _dense(stored: Tensor, tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
    """Dequantized by the gguf package, a slab at a time, in fp32, then rounded to `dtype`."""
    block, block_bytes = GGML_QUANT_SIZES[tensor.type]
    blocks = stored.view(-1, block_bytes).numpy()
    out = torch.empty(blocks.shape[0], block, dtype=dtype)
    slab = max(1, _SLAB // block)
    for at in range(0, len(blocks), slab):
        values = gguf.quants.dequantize(blocks[at : at + slab], tensor.type)
        out[at : at + slab] = torch.from_numpy(np.ascontiguousarray(values))
    return out.view(tensor.shape)


def _is_int4(tensor: GgufTensor) -> bool:
    return tensor.type.name in _INT4 and len(tensor.shape) > 1 and 0 not in tensor.shape


def _is_fp4(tensor: GgufTensor) -> bool:
    return tensor.type.name == "MXFP4" and len(tensor.shape) > 1 and 0 not in tensor.shape


def _refuse_unreadable(tensors: Mapping[str, GgufTensor]) -> None:
    """Types that the gguf package names but cannot dequantize are found by one block each, at opening."""
    firsts: dict[GGMLQuantizationType, tuple[str, GgufTensor]] = {}
    for name, tensor in tensors.items():
        firsts.setdefault(tensor.type, (name, tensor))
    for type_, (name, tensor) in firsts.items():
        if type_.name in _PLAIN:
            continue
        try:
            gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[type_][1]), dtype=np.uint8), type_)
        except NotImplementedError:
            raise ValueError(
                f"{tensor.file}: tensor {name} has type {type_.name}, which the gguf package cannot dequantize; use a "
                "file quantized in another type (Q4_0, Q4_1, Q8_0 …)"
            ) from None


def _parts(path: Path) -> list[Path]:
    """The file, or all parts of a split one in order. Raises ValueError naming the part that is missing."""
    split = _PART.fullmatch(path.name)
    count = int(split[3]) if split else 1
    files = [path.with_name(f"{split[1]}-{i:05d}-of-{split[3]}.gguf") for i in range(1, count + 1)] if split else [path]
    for i, file in enumerate(files, start=1):
        if not file.is_file():
            what = f"missing: part {i} of {count}; download it beside the others" if split else "no such file"
            raise ValueError(f"{file}: {what}")
    return files or [path]
