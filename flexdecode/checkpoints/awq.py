"""AWQ checkpoints (AutoAWQ gemm, gemv, gemv_fast; llm-awq): which matrices are packed, and in which layout.

What the file holds decides which matrices are packed (a module with a `qweight` is, whatever modules_to_not_convert
says); the config names the layout and the group, and the shapes of the scales and zeros must agree with both, since a
square matrix's qweight looks the same in gemm and gemv.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch

from flexdecode.checkpoints import int4
from flexdecode.checkpoints.packed import FLOAT_REMEDY, Packed, StoredSource, int4_bytes, require_float
from flexdecode.config import QuantConfig
from flexdecode.quantization.weights import Int4Weight

Layout = Literal["gemm", "gemv", "gemv_fast"]
_LAYOUTS: tuple[Layout, ...] = ("gemm", "gemv", "gemv_fast")
# values of `backend` that choose a kernel at run time and say nothing of the file
_KERNELS = {
    "", "autoawq", "auto", "auto_trainable", "machete", "marlin", "exllama_v1", "exllama_v2", "gemm", "gemm_triton",
    "gemv", "gemv_fast", "torch_awq", "torch_fused_awq", "llm-awq",
}  # fmt: skip


def parse_awq(config: Mapping[str, Any], qweight: torch.dtype) -> QuantConfig:
    """From `quantization_config`, or AutoAWQ's older quant_config.json (w_bit, q_group_size).

    Absent keys mean gemm, 4 bits, groups of 128, with zeros. llm-awq names no layout: `qweight`, the dtype the file
    holds, tells its int16 form (gemv_fast's) from its older int32 form (gemv's).
    Raises ValueError for what is not supported, by name.
    """
    bits = _number(config, "bits", "w_bit", 4)
    if bits != 4:
        raise ValueError(f"quantization_config: AWQ with bits {bits} is not supported, only 4; {FLOAT_REMEDY}")
    group = _number(config, "group_size", "q_group_size", 128)
    if group != -1 and group < 1:
        raise ValueError(f"quantization_config: group_size {group} is neither positive nor -1 (one group a row)")
    if config.get("desc_act"):
        raise ValueError(f"quantization_config: activation ordering (desc_act) is not supported; {FLOAT_REMEDY}")
    backend = str(config.get("backend") or "").lower()
    if backend not in _KERNELS:
        raise ValueError(
            f"quantization_config: AWQ backend {backend!r} is not known; known: {', '.join(sorted(_KERNELS - {''}))}"
        )
    named = config.get("version") or config.get("format") or (backend if backend in _LAYOUTS else "gemm")
    version = "llm-awq" if backend == "llm-awq" else str(named).lower()
    if version == "llm-awq":
        version = "gemv" if qweight == torch.int32 else "gemv_fast"
    if version not in _LAYOUTS:
        raise ValueError(
            f"quantization_config: AWQ version {version!r} is not supported, only {', '.join(_LAYOUTS)}; "
            f"use a checkpoint in one of these, or {FLOAT_REMEDY.removeprefix('use ')}"
        )
    skip = config.get("modules_to_not_convert") or ()
    zero_point = config.get("zero_point", True)
    return QuantConfig("awq", version, 4, group, zero_point is not False, tuple(map(str, skip)))


def find_awq(source: StoredSource, config: Mapping[str, Any]) -> dict[str, Packed]:
    """Logical name (`….weight`) -> packed matrix. Raises ValueError naming file, tensor and both shapes."""
    names = source.names()
    stems = [name.removesuffix(".qweight") for name in names if name.endswith(".qweight")]
    if not stems:
        return {}
    first = f"{stems[0]}.qweight"
    try:
        quant = parse_awq(config, source.dtype(first))
    except ValueError as error:
        raise ValueError(f"{source.path}: {error}") from None
    packed = {f"{stem}.weight": _packed(source, stem, quant) for stem in stems}
    for name in names:
        if name.endswith(".scales") and f"{name.removesuffix('.scales')}.weight" not in packed:
            raise ValueError(
                f"{source.file(name)}: {name} scales an activation (AutoAWQ's ScaledActivation), which is not "
                f"supported; {FLOAT_REMEDY}"
            )
    return packed


def _packed(source: StoredSource, stem: str, quant: QuantConfig) -> Packed:
    names = source.names()
    qweight, scales = f"{stem}.qweight", f"{stem}.scales"
    zeros = f"{stem}.scaled_zeros" if f"{stem}.scaled_zeros" in names else f"{stem}.qzeros"
    for name in (scales, zeros):
        if name not in names:
            raise ValueError(f"{source.path}: {name} is missing, though {qweight} is there; download the model again")
    if f"{stem}.weight" in names:
        raise ValueError(f"{source.path}: holds both {stem}.weight and {qweight}; remove the one that is stale")
    if f"{stem}.g_idx" in names:
        raise ValueError(
            f"{source.file(qweight)}: {stem}.g_idx reorders the inputs (actorder), which is not supported; "
            f"{FLOAT_REMEDY}"
        )
    dtype, scales_dtype = source.dtype(qweight), require_float(source, scales)
    wanted = torch.int16 if quant.layout == "gemv_fast" else torch.int32
    if dtype != wanted:
        raise ValueError(
            f"{source.file(qweight)}: {qweight} is {dtype}, but AWQ version {quant.layout!r} in quantization_config "
            f"has {wanted}; correct the version"
        )
    if quant.layout == "gemv_fast":
        require_float(source, zeros)
    elif source.dtype(zeros) != torch.int32:
        raise ValueError(
            f"{source.file(zeros)}: {zeros} is {source.dtype(zeros)}, but AWQ version {quant.layout!r} in "
            f"quantization_config has torch.int32"
        )
    n, k = _matrix(cast(Layout, quant.layout), source.shape(qweight))
    groups = _groups(source, stem, quant, n, k, zeros)
    fast = quant.layout == "gemv_fast"

    def load() -> Int4Weight:
        tensors = source.read(qweight), source.read(zeros), source.read(scales)
        if quant.layout == "gemm":
            return int4.decode_awq_gemm(*tensors)
        return (int4.decode_awq_gemv_fast if fast else int4.decode_awq_gemv)(*tensors, groups)

    # gemv_fast's zeros are fractions, made in fp32 from two tensors which may differ in dtype
    held = torch.float32 if fast and source.dtype(zeros) != scales_dtype else scales_dtype
    nbytes = int4_bytes(n, k, groups, held, zero_bytes=4 if fast else 1)
    return Packed((n, k), nbytes, (qweight, zeros, scales), quant, load)


def _matrix(layout: Layout, qweight: tuple[int, ...]) -> tuple[int, int]:
    """[N, K] from the shape of the qweight."""
    rows, columns = qweight if len(qweight) == 2 else (0, 0)
    return {"gemm": (8 * columns, rows), "gemv": (rows, 8 * columns), "gemv_fast": (4 * rows, columns)}[layout]


def _small_shapes(layout: Layout, n: int, k: int, group: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Shapes of (scales, zeros) that AutoAWQ writes, or None where the layout cannot hold such a matrix."""
    g = k if group == -1 else group
    if not (n and k) or k % g or k % 2 or (layout == "gemv_fast" and k % 64):
        return None
    groups = k // g
    if layout == "gemm":
        return (groups, n), (groups, n // 8)
    pad = max(1, 128 // g)  # the gemv kernel reads the zeros of 1024 columns at a time
    words = math.ceil(groups / (8 * pad)) * pad
    return ((n, 8 * words), (n, words)) if layout == "gemv" else ((8 * words, n), (8 * words, n))


def _groups(source: StoredSource, stem: str, quant: QuantConfig, n: int, k: int, zeros: str) -> int:
    """G, once the shapes of scales and zeros are those of the config's layout and group."""
    scales, qweight = source.shape(f"{stem}.scales"), source.shape(f"{stem}.qweight")
    found = (scales, source.shape(zeros))
    layout = cast(Layout, quant.layout)
    wanted = _small_shapes(layout, n, k, quant.group_size)
    if found == wanted:
        return 1 if quant.group_size == -1 else k // quant.group_size
    says = f"AWQ version {layout!r} with group_size {quant.group_size} in quantization_config"
    where = f"{source.file(f'{stem}.scales')}: {stem}"
    fits = [
        f"version {other!r} with group_size {group}"
        for other in _LAYOUTS
        for group in (quant.group_size, 32, 64, 128, 256, -1)
        if (source.dtype(f"{stem}.qweight") == torch.int16) == (other == "gemv_fast")
        and found == _small_shapes(other, *_matrix(other, qweight), group)
    ]
    if fits:
        raise ValueError(f"{where}: {says}, but qweight {qweight} and scales {scales} fit {fits[0]}; correct it")
    if wanted is None:
        raise ValueError(f"{where}: {says} cannot hold a matrix of {n} rows and {k} columns (qweight {qweight})")
    raise ValueError(
        f"{where}: {says} needs scales {wanted[0]} and zeros {wanted[1]} beside qweight {qweight}, but the file has "
        f"{found[0]} and {found[1]}"
    )


def _number(config: Mapping[str, Any], key: str, legacy: str, default: int) -> int:
    value = config.get(key)
    value = config.get(legacy) if value is None else value
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"quantization_config: {key} is {value!r}, where a whole number is needed")
    return value
