"""SafetensorsSource: a Hugging Face directory of config.json and safetensors files.

Knows no model and no quantization: names and tensors are as the files hold them (`quantized` makes the packed ones
logical). A tensor read is a mapping of its own bytes, so that memory follows what the caller keeps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flexdecode.checkpoints.files import as_dtype, map_bytes, read_json
from flexdecode.checkpoints.index import Entry, find_tensors


class SafetensorsSource:
    """A directory with config.json and model.safetensors, shards with an index, or one other safetensors file.

    Opening reads JSON and headers, and raises ValueError (one line, naming file and tensor) for whatever is missing,
    cut short or contradictory; see `index` for the rules.
    """

    format: Literal["hf", "gguf", "random"] = "hf"
    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]

    def __init__(self, directory: Path | str) -> None:
        self.path = Path(directory)
        if not self.path.is_dir():
            raise ValueError(f"{self.path}: is not a directory")
        if not (self.path / "config.json").exists():
            ggufs = sorted(self.path.glob("*.gguf"))
            remedy = f"give the GGUF file itself: {ggufs[0]}" if ggufs else "download it beside the weights"
            raise ValueError(f"{self.path / 'config.json'}: missing; {remedy}")
        self.config = read_json(self.path / "config.json")
        generation = self.path / "generation_config.json"
        self.generation_config = read_json(generation) if generation.exists() else {}
        self._entries = find_tensors(self.path)

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The stored dtype."""
        return self._entry(name).dtype

    def file(self, name: str) -> Path:
        """The file that holds the tensor, for messages."""
        return self._entry(name).file

    def nbytes(self, name: str) -> int:
        return self._entry(name).nbytes

    def read(self, name: str) -> Tensor:
        entry = self._entry(name)
        return as_dtype(map_bytes(entry.file, entry.offset, entry.nbytes), entry.dtype, entry.shape)

    def _entry(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise ValueError(f"{self.path}: holds no tensor {name}") from None
