"""Writing a Hugging Face directory: shards, index, JSON files. Knows no tensor's meaning.

A file is written under a temporary name and renamed when it is whole, so that a file of its own name is always complete
and an interrupted run leaves nothing that could be taken for a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from flexdecode.checkpoints.index import INDEX, SINGLE, read_header

_TEMPORARY = ".tmp"
_PIECE = 1 << 24  # bytes copied at a time
# What stands beside the weights and is no weight: tokenizer, templates, generation defaults, terms of use.
_BESIDE = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "generation_config.json", "preprocessor_config.json", "processor_config.json", "LICENSE*",
    "NOTICE*", "USE_POLICY*",
)  # fmt: skip


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, names in order, so that the same tensors make the same bytes."""
    temporary = path.with_name(path.name + _TEMPORARY)
    temporary.write_bytes(b"")
    mode = temporary.stat().st_mode  # safetensors gives its file to the owner alone
    save_file({name: tensors[name].contiguous() for name in sorted(tensors)}, temporary, metadata={"format": "pt"})
    temporary.chmod(mode)
    _settle(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """One JSON file, keys in the order given."""
    temporary = path.with_name(path.name + _TEMPORARY)
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _settle(temporary, path)


def shard_name(number: int, count: int) -> str:
    """The usual name of shard `number` of `count`, counted from 0."""
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(directory: Path, count: int) -> None:
    """The index over `count` shards, made from their headers. Raises ValueError where two hold one name."""
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(count):
        shard = shard_name(number, count)
        for name, entry in read_header(directory / shard).items():
            if name in weight_map:
                raise ValueError(f"{directory / shard}: tensor {name} is also in {weight_map[name]}")
            weight_map[name] = shard
            total += entry.nbytes
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})


def join_shards(directory: Path, count: int) -> None:
    """Make `count` shards one file, range by range, so that no tensor is in memory; the shards go when it is whole.

    Tensors of wide types come first, so that each lies on a multiple of its size.
    """
    single = directory / SINGLE
    shards = [directory / shard_name(number, count) for number in range(count)]
    if not single.exists():
        pieces = [(name, record, shard, start) for shard in shards for name, record, start in _ranges(shard)]
        pieces.sort(key=lambda piece: (-_width(piece[1]), piece[0]))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, record, _, _ in pieces:
            header[name] = {**record, "data_offsets": [at, at := at + _size(record)]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        temporary = single.with_name(single.name + _TEMPORARY)
        with temporary.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for _, record, shard, start in pieces:
                with shard.open("rb") as stream:
                    stream.seek(start + record["data_offsets"][0])
                    left = _size(record)
                    while left:
                        left -= out.write(stream.read(min(left, _PIECE)))
        _settle(temporary, single)
    for shard in shards:
        shard.unlink(missing_ok=True)


def _ranges(shard: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(name, the header's record, where the data begin) of every tensor of a file."""
    with shard.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    for name, record in header.items():
        if name != "__metadata__":
            yield name, record, 8 + length


def _size(record: Mapping[str, Any]) -> int:
    begin, end = record["data_offsets"]
    return int(end) - int(begin)


def _width(record: Mapping[str, Any]) -> int:
    """Bytes of an element; 0 of a tensor without any."""
    elements: int = math.prod(record["shape"])
    return _size(record) // max(1, elements)


def copy_beside(source: Path, directory: Path) -> list[str]:
    """Copy tokenizer, templates, generation config and licence files; returns their names."""
    names = sorted({path.name for pattern in _BESIDE for path in source.glob(pattern) if path.is_file()})
    for name in names:
        temporary = directory / (name + _TEMPORARY)
        shutil.copyfile(source / name, temporary)
        _settle(temporary, directory / name)
    return names


def leftovers(directory: Path) -> Iterator[Path]:
    """Temporary files of a run that was cut off."""
    return directory.glob(f"*{_TEMPORARY}")


def _settle(temporary: Path, path: Path) -> None:
    """The file under its own name, its bytes on the disk before that."""
    with temporary.open("rb+") as stream:
        os.fsync(stream.fileno())
    temporary.replace(path)
