"""The header of a GGUF file (versions 2 and 3): metadata and the directory of tensors.

Reads no tensor data and knows no model. Written here, and not taken from the gguf package's reader, because that one
makes several arrays for every token and merge (a second and a half for a small vocabulary) and does not say where a
file is cut short; block sizes and type names do come from the package.

Source of the format: ggml's docs/gguf.md. Header: magic, version u32, tensor count u64, key count u64; keys: string,
type u32, value; tensors: name, number of dimensions u32, dimensions u64 (innermost first), type u32, offset u64.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

AGAIN = "download it again"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4  # ggml's own


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies. `shape` is row-major: its last entry is GGUF's first dimension, the contiguous one."""

    file: Path
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Metadata(Mapping[str, Any]):
    """Key -> Python value (arrays as lists), each decoded when it is first asked for."""

    def __init__(self, file: Path, data: mmap.mmap, places: Mapping[str, tuple[int, int]]) -> None:
        self._file, self._data, self._places = file, data, places
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._values:
            kind, at = self._places[key]
            self._values[key] = _Reader(self._file, self._data, at).value(kind)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read_header(file: Path) -> tuple[Metadata, dict[str, GgufTensor]]:
    """Metadata and tensors of one file. Raises ValueError for a file that is cut short, foreign, big-endian, of an
    unknown version, or holds a tensor of a type that the gguf package does not know."""
    try:
        with file.open("rb") as stream:
            head = stream.read(8)
            if not head:
                raise ValueError(f"{file}: is empty (0 bytes); {AGAIN}")
            if head.startswith(b"version "):
                raise ValueError(f"{file}: is a Git LFS pointer and not the weights; fetch them with `git lfs pull`")
            if head[:4] != b"GGUF":
                raise ValueError(f"{file}: is not a GGUF file (it begins with {head[:4]!r}); {AGAIN}")
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from None
    reader = _Reader(file, data, 4)
    version = reader.number("I")
    if version & 0xFFFF == 0:
        raise ValueError(f"{file}: is big-endian; convert it with `gguf-convert-endian FILE little`")
    if version not in (2, 3):
        raise ValueError(f"{file}: has GGUF version {version}, and only 2 and 3 are supported; use a newer file")
    tensor_count, key_count = reader.number("Q"), reader.number("Q")
    places: dict[str, tuple[int, int]] = {}
    for _ in range(key_count):
        key, kind = reader.name(), reader.number("I")
        if key in places:
            raise ValueError(f"{file}: metadata key {key} appears twice; {AGAIN}")
        places[key] = (kind, reader.at)
        reader.skip(kind, key)
    metadata = Metadata(file, data, places)
    records = [reader.tensor() for _ in range(tensor_count)]
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1:
        raise ValueError(f"{file}: general.alignment is {align!r}, where a positive number is needed; {AGAIN}")
    start = -(-reader.at // align) * align
    tensors: dict[str, GgufTensor] = {}
    for name, dims, kind, offset in records:
        if name in tensors:
            raise ValueError(f"{file}: tensor {name} appears twice; {AGAIN}")
        tensors[name] = _place(file, len(data), name, dims, kind, start + offset)
    return metadata, tensors


def _place(file: Path, size: int, name: str, dims: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    try:
        type_ = GGMLQuantizationType(kind)
    except ValueError:
        raise ValueError(
            f"{file}: tensor {name} has GGUF type {kind}, which the installed gguf package does not know; use a file "
            "quantized in another type (Q4_0, Q4_1, Q8_0 …)"
        ) from None
    block, block_bytes = GGML_QUANT_SIZES[type_]
    if dims and dims[0] % block:
        raise ValueError(
            f"{file}: tensor {name} has {dims[0]} columns, but {type_.name} has blocks of {block}; {AGAIN}"
        )
    nbytes = math.prod(dims) // block * block_bytes
    if offset + nbytes > size:
        raise ValueError(f"{file}: is cut short: tensor {name} ends at byte {offset + nbytes} of {size}; {AGAIN}")
    return GgufTensor(file, type_, dims[::-1], offset, nbytes)


class _Reader:
    """A position in the mapped file."""

    def __init__(self, file: Path, data: mmap.mmap, at: int) -> None:
        self.file, self.data, self.at = file, data, at

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(code) * count
        self.need(size)
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += size
        return values

    def need(self, size: int) -> None:
        if self.at + size > len(self.data):
            raise ValueError(f"{self.file}: is cut short inside the header, at byte {len(self.data)}; {AGAIN}")

    def text(self) -> str:
        """Not every file in the wild has clean UTF-8: a bad byte becomes U+FFFD."""
        size = self.number("Q")
        self.need(size)
        self.at += size
        return self.data[self.at - size : self.at].decode("utf-8", errors="replace")

    def name(self) -> str:
        """Of a key or a tensor, which one line of a message must be able to hold."""
        name = self.text()
        if not name.isprintable():
            raise ValueError(
                f"{self.file}: the header is damaged at byte {self.at}, at the name {name[:40]!r}; {AGAIN}"
            )
        return name

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, count = self.name(), self.number("I")
        if count > _MAX_DIMS:
            raise ValueError(f"{self.file}: tensor {name} has {count} dimensions, more than {_MAX_DIMS}; {AGAIN}")
        return name, self.numbers("Q", count), self.number("I"), self.number("Q")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            return list(self.numbers(_SCALARS[inner], count))
        return [self.value(inner) for _ in range(count)]

    def skip(self, kind: int, key: str) -> None:
        """Over one value without decoding it; strings are walked length by length, there being no other way."""
        if kind in _SCALARS:
            size = struct.calcsize(_SCALARS[kind])
        elif kind == _STRING:
            size = self.number("Q")
        elif kind == _ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in _SCALARS:
                size = struct.calcsize(_SCALARS[inner]) * count
            elif inner == _STRING:
                self.skip_texts(count)
                size = 0
            else:
                for _ in range(count):
                    self.skip(inner, key)
                size = 0
        else:
            raise ValueError(f"{self.file}: metadata key {key} has the unknown type {kind}; {AGAIN}")
        self.need(size)
        self.at += size

    def skip_texts(self, count: int) -> None:
        length, at = struct.Struct("<Q").unpack_from, self.at
        try:
            for _ in range(count):
                at += 8 + length(self.data, at)[0]
        except (struct.error, IndexError, OverflowError):
            at = len(self.data) + 1
        self.need(at - self.at)
        self.at = at
