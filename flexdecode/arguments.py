"""What the words mean with which a model is asked for: dtypes, devices, lengths. Knows no checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flexdecode.config import ModelConfig

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}


def dtype_named(
    option: str, name: str, default: torch.dtype, more: Mapping[str, torch.dtype] | None = None
) -> torch.dtype:
    """The type that an option names, `default` for auto; `more` are known beside the compute types."""
    known = _DTYPES | dict(more or {})
    if name == "auto":
        return default
    if name not in known:
        raise ValueError(f"{option} {name!r} is not known (known: auto, {', '.join(known)})")
    return known[name]


def device_named(name: str) -> torch.device:
    """The device of that name, for auto CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise ValueError(f"device {name!r} is not known: {str(problem).splitlines()[0]}") from problem
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: torch {torch.__version__} sees no CUDA device; use --device cpu")
    return device


def check_context(max_context: int | None, config: ModelConfig) -> None:
    """Raises ValueError for a context that the model was not made for."""
    if max_context is None:
        return
    if max_context < 1:
        raise ValueError(f"max_context must be at least 1, got {max_context}")
    grows = any(x.attention.rope is not None and x.attention.rope.type == "dynamic" for x in config.layers)
    if max_context > config.max_position and not grows:
        raise ValueError(
            f"max_context={max_context} is more than the {config.max_position} positions that the model was made for"
        )
