"""compressed-tensors checkpoints (llm-compressor): pack-quantized int4 and int-quantized int8, weights only.

What the file holds decides which matrices are packed, whatever `ignore` says; the group of config_groups whose targets
name a module tells its bits, group and symmetry, and the shapes in the file must agree with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from flexdecode.checkpoints import int4
from flexdecode.checkpoints.packed import FLOAT_REMEDY, Packed, StoredSource, int4_bytes, require_float
from flexdecode.config import QuantConfig
from flexdecode.quantization.weights import Int4Weight, Int8Weight

Layout = Literal["pack-quantized", "int-quantized"]
_BITS: dict[str, int] = {"pack-quantized": 4, "int-quantized": 8}


@dataclass(frozen=True)
class Scheme:
    """One of config_groups. A target is a class name, a module's full name, or `re:` and a pattern from its start."""

    name: str
    targets: tuple[str, ...]
    quant: QuantConfig


def parse_compressed(config: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """From `quantization_config`. Raises ValueError for whatever would change the arithmetic and is not supported."""
    for key in ("kv_cache_scheme", "transform_config"):
        if config.get(key):
            raise ValueError(f"quantization_config: {key} is not supported; {FLOAT_REMEDY}")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ValueError(f"quantization_config: sparsity_config is not supported; {FLOAT_REMEDY}")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError("quantization_config: compressed-tensors without config_groups; download config.json again")
    skip = tuple(map(str, config.get("ignore") or ()))
    for pattern in skip:
        _compile(pattern)
    return tuple(_scheme(name, group, config.get("format"), skip) for name, group in groups.items())


def _scheme(name: str, group: Any, top_format: Any, skip: tuple[str, ...]) -> Scheme:
    where = f"quantization_config: config_groups.{name}"
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise ValueError(f"{where} does not say how weights are stored; {FLOAT_REMEDY}")
    for key in ("input_activations", "output_activations"):
        if group.get(key):
            raise ValueError(f"{where} quantizes activations ({key}), which is not supported; {FLOAT_REMEDY}")
    weights = group["weights"]
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    layout = group.get("format") or top_format or ("int-quantized" if bits == 8 else "pack-quantized")
    if layout not in _BITS:
        raise ValueError(f"{where}: format {layout!r} is not supported, only {' and '.join(_BITS)}; {FLOAT_REMEDY}")
    if kind != "int" or bits != _BITS[layout]:
        raise ValueError(
            f"{where}: {layout} with {bits} bits of type {kind} is not supported, only {_BITS[layout]} bits of type "
            f"int; {FLOAT_REMEDY}"
        )
    if str(weights.get("actorder") or "weight").lower() not in ("weight", "static"):  # these two are undone on disk
        raise ValueError(f"{where}: actorder {weights['actorder']!r} is not supported; {FLOAT_REMEDY}")
    if weights.get("dynamic"):
        raise ValueError(f"{where}: dynamic weights are not supported; {FLOAT_REMEDY}")
    symmetric, size = weights.get("symmetric", True), weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in ("group", "channel", "tensor") or (layout == "int-quantized" and strategy == "group"):
        raise ValueError(f"{where}: strategy {strategy!r} of {layout} is not supported; {FLOAT_REMEDY}")
    if layout == "int-quantized" and not symmetric:
        raise ValueError(f"{where}: int-quantized is supported only when symmetric; {FLOAT_REMEDY}")
    if strategy == "group" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"{where}: strategy group needs a positive group_size, and has {size!r}")
    targets = tuple(map(str, group.get("targets") or ()))
    for target in targets:
        _compile(target)
    size = size if strategy == "group" else -1
    quant = QuantConfig("compressed-tensors", cast(Layout, layout), bits, size, not symmetric, skip)
    return Scheme(name, targets, quant)


def find_compressed(source: StoredSource, config: Mapping[str, Any]) -> dict[str, Packed]:
    """Logical name (`….weight`) -> packed matrix. Raises ValueError naming file, tensor and both figures."""
    try:
        schemes = parse_compressed(config)
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from None
    packed: dict[str, Packed] = {}
    for name in source.names():
        stem, _, part = name.rpartition(".")
        if part == "weight_packed":
            packed[f"{stem}.weight"] = _int4(source, stem, _match(schemes, stem))
        elif part == "weight" and source.dtype(name) == torch.int8:
            packed[name] = _int8(source, stem, _match(schemes, stem))
    used = {part for matrix in packed.values() for part in matrix.parts}
    for name in source.names():
        kind = name.rpartition(".")[2]
        if name not in used and kind in _REFUSED:
            raise ValueError(f"{source.file(name)}: {name}: {_REFUSED[kind]}, which is not supported; {FLOAT_REMEDY}")
    return packed


_REFUSED = {
    "weight_g_idx": "the inputs are reordered (actorder)",
    "weight_scale": "scales a weight that is neither int4 packed nor int8",
    "weight_zero_point": "is a zero point of a weight that is neither int4 packed nor int8",
    "weight_global_scale": "the weight has a second, global scale",
    "input_scale": "activations are quantized",
    "input_zero_point": "activations are quantized",
    "input_global_scale": "activations are quantized",
    "output_scale": "activations are quantized",
    "output_zero_point": "activations are quantized",
    "k_scale": "the key cache is quantized",
    "v_scale": "the value cache is quantized",
}


def _int4(source: StoredSource, stem: str, scheme: Scheme | None) -> Packed:
    packed, scale, shape, zero = (f"{stem}.weight_{part}" for part in ("packed", "scale", "shape", "zero_point"))
    names, file = source.names(), source.file(packed)
    for name in (scale, shape):
        if name not in names:
            raise ValueError(f"{file}: {name} is missing, though {packed} is there; download the model again")
    if f"{stem}.weight" in names:
        raise ValueError(f"{file}: holds both {stem}.weight and {packed}; remove the one that is stale")
    logical = tuple(int(x) for x in source.read(shape).flatten())
    stored, scales = source.shape(packed), source.shape(scale)
    if source.dtype(packed) != torch.int32 or len(logical) != 2 or stored != (logical[0], -(-logical[1] // 8)):
        raise ValueError(
            f"{file}: {packed} is {source.dtype(packed)} {stored}, which cannot hold {shape} {logical} in int4; "
            "only matrices of eight codes a word are supported"
        )
    n, k = logical
    if k % 2:
        raise ValueError(f"{file}: {stem} has {k} columns; an odd number cannot be held in int4; {FLOAT_REMEDY}")
    groups = _groups(source, stem, scheme, "pack-quantized", n, k, scales)
    if zero not in names and scheme is not None and scheme.quant.zero_point:
        raise ValueError(f"{file}: {zero} is missing, though config_groups.{scheme.name} is asymmetric")
    if zero in names:
        kind, dims = source.dtype(zero), source.shape(zero)
        wanted = (-(-n // 8), groups) if kind == torch.int32 else (n, groups)
        if kind not in (torch.int32, torch.int8) or dims != wanted:
            raise ValueError(f"{file}: {zero} is {kind} {dims}, where {wanted} belongs to {packed} {stored}")

    def load() -> Int4Weight:
        zeros = source.read(zero) if zero in names else None
        return int4.decode_pack_quantized(source.read(packed), source.read(scale), zeros, (n, k))

    quant = scheme.quant if scheme else QuantConfig(
        "compressed-tensors", "pack-quantized", 4, -1 if groups == 1 else k // groups, zero in names
    )  # fmt: skip
    parts = tuple(name for name in (packed, scale, shape, zero) if name in names)
    return Packed((n, k), int4_bytes(n, k, groups, require_float(source, scale), 1), parts, quant, load)


def _int8(source: StoredSource, stem: str, scheme: Scheme | None) -> Packed:
    weight, scale, zero = f"{stem}.weight", f"{stem}.weight_scale", f"{stem}.weight_zero_point"
    names, file, dims = source.names(), source.file(weight), source.shape(weight)
    if scale not in names:
        raise ValueError(f"{file}: {scale} is missing, though {weight} is int8; download the model again")
    if len(dims) != 2:
        raise ValueError(f"{file}: {weight} is int8 {dims}; only matrices are supported in int8; {FLOAT_REMEDY}")
    n, k = dims
    require_float(source, scale)
    _groups(source, stem, scheme, "int-quantized", n, k, source.shape(scale))
    if zero in names and bool((source.read(zero) != 0).any()):
        raise ValueError(f"{file}: {zero} is not 0: int-quantized is supported only when symmetric; {FLOAT_REMEDY}")

    def load() -> Int8Weight:
        return int4.decode_int_quantized(source.read(weight), source.read(scale))

    quant = scheme.quant if scheme else QuantConfig("compressed-tensors", "int-quantized", 8, -1, False)
    return Packed((n, k), n * k + 4 * n, tuple(x for x in (weight, scale, zero) if x in names), quant, load)


def _groups(
    source: StoredSource, stem: str, scheme: Scheme | None, layout: str, n: int, k: int, scales: tuple[int, ...]
) -> int:
    """G, once the shape of the scales is one that the scheme and the layout allow."""
    where = f"{source.file(f'{stem}.weight_scale')}: {stem}"
    if scheme is not None and scheme.quant.layout != layout:
        raise ValueError(f"{where} is stored {layout}, but config_groups.{scheme.name} says {scheme.quant.layout}")
    if scales in ((1,), (1, 1), (n,)):  # one scale for the whole matrix, or one a row
        groups = 1
    else:
        groups = scales[1] if len(scales) == 2 and scales[0] == n else 0
    if not groups or k % groups or (layout == "int-quantized" and groups != 1):
        raise ValueError(f"{where} has weight_scale {scales}, which does not divide its {n} rows and {k} columns")
    size = scheme.quant.group_size if scheme else -1
    if scheme is not None and groups != (1 if size == -1 else k / size):
        raise ValueError(
            f"{where} has weight_scale {scales} for {n} rows and {k} columns, groups of {k // groups}, but "
            f"config_groups.{scheme.name} says {'one group a row' if size == -1 else f'group_size {size}'}"
        )
    return groups


def _match(schemes: tuple[Scheme, ...], module: str) -> Scheme | None:
    """The scheme of a module: by its name or a pattern first, then by class; None where none claims it or it is
    ignored, and then the shapes alone tell."""
    if any(_named(target, module) for scheme in schemes for target in scheme.quant.skip):
        return None
    for scheme in schemes:
        if any(_named(target, module) for target in scheme.targets):
            return scheme
    return next((scheme for scheme in schemes if "Linear" in scheme.targets), None)


def _named(target: str, module: str) -> bool:
    return _compile(target).match(module) is not None if target.startswith("re:") else target == module


def _compile(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix("re:") if target.startswith("re:") else re.escape(target))
    except re.error as error:
        raise ValueError(f"quantization_config: {target!r} is not a regular expression ({error})") from None
