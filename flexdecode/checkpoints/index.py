"""Which tensors a Hugging Face directory holds, and where: headers and the index, checked against each other.

Reads no tensor. Every shard's header is read once, at opening (a few kilobytes a file), so that a missing, cut or
foreign file is found in the first second and not after minutes of loading.

Where the files and the index disagree: a tensor that the index lists and its shard lacks is an error; a tensor that a
shard holds and the index does not list is read all the same, since what the file holds decides. Where both
`model.safetensors` and an index exist, the single file wins, as in transformers.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexdecode.checkpoints.files import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
AGAIN = "download it again"

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I16": torch.int16, "U16": torch.uint16,
    "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
_HEADER_LIMIT = 100_000_000  # the format's own limit, in bytes


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: bytes [offset, offset + nbytes) of `file`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file, from its header alone: eight bytes of length, then JSON.

    Raises ValueError for a file that is empty, cut short, too long, or no safetensors file at all.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            length = int.from_bytes(head, "little")
            if size == 0:
                raise ValueError(f"{file}: is empty (0 bytes); {AGAIN}")
            if head.startswith(b"version "):
                raise ValueError(f"{file}: is a Git LFS pointer and not the weights; fetch them with `git lfs pull`")
            if size < 8 or length > _HEADER_LIMIT:
                raise ValueError(f"{file}: is not a safetensors file ({size} bytes); {AGAIN}")
            if 8 + length > size:
                raise ValueError(f"{file}: is cut short: the header ends at byte {8 + length} of {size}; {AGAIN}")
            text = stream.read(length)
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from None
    try:
        header = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file}: the header is not JSON ({error}); {AGAIN}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file}: the header is not a JSON object; {AGAIN}")
    start = 8 + length
    entries = {name: _entry(file, name, record, start) for name, record in header.items() if name != "__metadata__"}
    name, end = max(((n, e.offset + e.nbytes) for n, e in entries.items()), key=lambda x: x[1], default=("", start))
    if end > size:
        raise ValueError(f"{file}: is cut short: tensor {name} ends at byte {end} of {size}; {AGAIN}")
    if end < size:
        raise ValueError(f"{file}: the tensors end at byte {end} but the file has {size}; {AGAIN}")
    return entries


def _entry(file: Path, name: str, record: Any, start: int) -> Entry:
    try:
        kind, dims, (begin, end) = record["dtype"], record["shape"], record["data_offsets"]
        shape = tuple(int(x) for x in dims)
        sound = 0 <= int(begin) <= int(end) and min(shape, default=0) >= 0 and name.isprintable()
    except (TypeError, KeyError, ValueError, OverflowError):
        sound = False
    if not sound:
        raise ValueError(f"{file}: the header's entry for tensor {ascii(name)[1:-1]} is malformed; {AGAIN}")
    dtype = _DTYPES.get(str(kind))
    if dtype is None:
        raise ValueError(
            f"{file}: tensor {name} has dtype {kind!r}, which is not supported; known: {', '.join(_DTYPES)}"
        )
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != end - begin:
        raise ValueError(f"{file}: tensor {name} needs {nbytes} bytes but the header gives it {end - begin}; {AGAIN}")
    return Entry(file, dtype, shape, start + begin, nbytes)


def find_tensors(directory: Path) -> dict[str, Entry]:
    """Every tensor of a directory, verified against the headers. Raises ValueError naming the file and the tensor."""
    if (directory / SINGLE).exists():
        return read_header(directory / SINGLE)
    if (directory / INDEX).exists():
        return _sharded(directory)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) == 1:
        return read_header(files[0])
    if files:
        raise ValueError(
            f"{directory}: holds {len(files)} safetensors files ({files[0].name} …) but no {INDEX} that says which "
            "belong to the model; download the index too"
        )
    raise ValueError(f"{directory}: {_nothing_to_read(directory)}")


def _sharded(directory: Path) -> dict[str, Entry]:
    index = directory / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(s, str) for s in weight_map.values()):
        raise ValueError(f"{index}: has no weight_map from tensor to file; {AGAIN}")
    headers: dict[str, dict[str, Entry]] = {}
    for name, shard in weight_map.items():
        if shard in headers:
            continue
        if Path(shard).name != shard:
            raise ValueError(f"{index}: places tensor {name} in {shard!r}, which is not a plain file name; {AGAIN}")
        if not (directory / shard).exists():
            raise ValueError(f"{directory / shard}: missing, though {INDEX} places tensor {name} in it; {AGAIN}")
        headers[shard] = read_header(directory / shard)
    found: dict[str, Entry] = {}
    for name, shard in weight_map.items():
        if name not in headers[shard]:
            raise ValueError(f"{directory / shard}: lacks tensor {name}, which {INDEX} places in it; {AGAIN}")
        found[name] = headers[shard][name]
    for header in headers.values():
        for name, entry in header.items():
            if name not in weight_map and found.setdefault(name, entry) is not entry:
                raise ValueError(
                    f"{entry.file}: tensor {name} is also in {found[name].file.name} and {INDEX} does not say which "
                    f"counts; {AGAIN}"
                )
    return found


def _nothing_to_read(directory: Path) -> str:
    pickles = sorted(p.name for ending in ("bin", "pt", "pth", "ckpt") for p in directory.glob(f"*.{ending}"))
    ggufs = sorted(p.name for p in directory.glob("*.gguf"))
    if ggufs:
        return f"holds no safetensors file; give the GGUF file itself: {directory / ggufs[0]}"
    if pickles:
        return (
            f"holds pickled weights only ({pickles[0]}), and unpickling can run any code; convert them to safetensors "
            "(transformers: from_pretrained(...), then save_pretrained(...))"
        )
    return f"holds no weights: neither {SINGLE} nor {INDEX}; {AGAIN}"
