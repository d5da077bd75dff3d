"""QuantizedSource: packed integer matrices presented under their float names.

Knows the methods by name and leaves each layout to its reader. gpt-oss's mxfp4 passes through unchanged: its blocks and
scales belong to experts that only the family can put in order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from flexdecode.checkpoints.awq import find_awq
from flexdecode.checkpoints.compressed import find_compressed
from flexdecode.checkpoints.files import read_json
from flexdecode.checkpoints.packed import FLOAT_REMEDY, Packed, StoredSource
from flexdecode.checkpoints.source import Source
from flexdecode.config import QuantConfig
from flexdecode.quantization.weights import Weight

_LEGACY = ("quant_config.json", "quantize_config.json")
_PACKED_ENDINGS = (".qweight", ".weight_packed")


class QuantizedSource:
    """`inner` with every packed matrix as one tensor `….weight`; all else as it is.

    `quantization` lists the distinct layouts found, for reports. Raises ValueError (one line, naming file, tensor and
    remedy) for a method, layout or combination that is not supported, or where config and file contradict each other.
    """

    format: Literal["hf", "gguf", "random"] = "hf"
    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    quantization: tuple[QuantConfig, ...]

    def __init__(self, inner: StoredSource, quantization_config: Mapping[str, Any]) -> None:
        self.path, self.config, self.generation_config = inner.path, inner.config, inner.generation_config
        self._inner = inner
        method = quantization_method(quantization_config)
        if method == "awq":
            self._packed = find_awq(inner, quantization_config)
        elif method == "compressed-tensors":
            self._packed = find_compressed(inner, quantization_config)
        else:
            raise ValueError(
                f"{inner.path}: quantization method {method!r} is not supported, only awq and compressed-tensors "
                f"(int4 and int8 weights); {FLOAT_REMEDY}"
            )
        if not self._packed:
            raise ValueError(
                f"{inner.path}: quantization_config says {method}, but no tensor is packed; if the weights are float, "
                "remove quantization_config from config.json"
            )
        used = {part for matrix in self._packed.values() for part in matrix.parts}
        self._names = dict.fromkeys([*(name for name in inner.names() if name not in used), *self._packed])
        self.quantization = tuple(dict.fromkeys(matrix.quantization for matrix in self._packed.values()))

    def names(self) -> Collection[str]:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        packed = self._find(name)
        return packed.shape if packed else self._inner.shape(name)

    def nbytes(self, name: str) -> int:
        packed = self._find(name)
        return packed.nbytes if packed else self._inner.nbytes(name)

    def read(self, name: str) -> Weight:
        packed = self._find(name)
        return packed.load() if packed else self._inner.read(name)

    def _find(self, name: str) -> Packed | None:
        if name not in self._names:
            raise ValueError(f"{self.path}: holds no tensor {name}")
        return self._packed.get(name)


def with_quantization(inner: StoredSource) -> Source:
    """`inner`, or a QuantizedSource where its config, or AutoAWQ's older file beside it, says that it is packed."""
    config = inner.config.get("quantization_config") or inner.config.get("compression_config")
    packed = next((name for name in inner.names() if name.endswith(_PACKED_ENDINGS)), None)
    if config is None and packed is not None:
        legacy = next((inner.path / name for name in _LEGACY if (inner.path / name).exists()), None)
        if legacy is None:
            raise ValueError(
                f"{inner.file(packed)}: {packed} is packed, but config.json has no quantization_config that says how; "
                "download config.json (or quant_config.json) again"
            )
        config = read_json(legacy)
        if "quant_method" not in config:
            config = {**config, "quant_method": "gptq" if "desc_act" in config else "awq"}
    if config is None:
        return inner
    if not isinstance(config, Mapping):
        raise ValueError(f"{inner.path / 'config.json'}: quantization_config is not an object; download it again")
    return inner if quantization_method(config) == "mxfp4" else QuantizedSource(inner, config)


def quantization_method(config: Mapping[str, Any]) -> str:
    """`quant_method` in lower case, or what the other keys show where it is absent."""
    method = config.get("quant_method")
    if method is not None:
        return str(method).lower()
    if "config_groups" in config:
        return "compressed-tensors"
    if config.get("load_in_4bit") or config.get("load_in_8bit"):
        return "bitsandbytes"
    return "awq" if {"w_bit", "q_group_size", "version", "zero_point"} & config.keys() else "unknown"
