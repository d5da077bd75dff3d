"""GGUF's rotary keys and tensors to transformers' rope parameters.

Sources: the GGUF specification, and llama.cpp's converter and context for what it leaves open. Formulas: `models.rope`.
"""

from __future__ import annotations

import math
from typing import Any

from flexdecode.checkpoints.source import Source
from flexdecode.families.gguf_keys import Keys

_LLAMA3, _LONG, _SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
_KINDS = ("none", "linear", "yarn", "longrope")


def rope_parameters(keys: Keys, source: Source, head_dim: int, max_position: int) -> dict[str, Any]:
    """Of all layers, or by kind of layer. Raises ValueError for a scaling that is not served."""
    theta = keys("rope.freq_base", 10000.0)
    rope = {"rope_theta": theta, **_scaling(keys, source, max_position)}
    rotary = keys.shared("rope.dimension_count")
    if rotary not in (None, head_dim):
        rope["partial_rotary_factor"] = rotary / head_dim
    if keys.arch == "gemma3":
        # llama.cpp turns the sliding layers at 10000 without scaling, whatever the file says of the others.
        local = {"rope_type": "default", "rope_theta": keys("rope.freq_base_swa", 10000.0)}
        return {"full_attention": rope, "sliding_attention": local}
    local_theta = keys("rope.freq_base_swa", theta)
    if local_theta != theta:
        raise ValueError(
            f"{keys.where}: {keys.name('rope.freq_base_swa')} is {local_theta:g} and freq_base {theta:g}; two are only "
            "supported for gemma3"
        )
    return rope


def _scaling(keys: Keys, source: Source, max_position: int) -> dict[str, Any]:
    """rope_type and its parameters."""
    names = source.names()
    old_name = keys("rope.scale_linear")
    factor = float(keys("rope.scaling.factor") or old_name or 1.0)
    original = keys("rope.scaling.original_context_length") or max_position
    attention = keys("rope.scaling.attn_factor")
    kind = keys("rope.scaling.type", "linear" if factor != 1.0 else "none")
    if kind not in _KINDS:
        raise ValueError(f"{keys.where}: rope scaling {kind!r} is not supported (known: {', '.join(_KINDS)})")
    divided = next((name for name in (_LONG, _LLAMA3) if name in names), None)
    if kind == "longrope" and divided != _LONG:
        raise ValueError(f"{keys.where}: rope scaling is longrope, but tensor {_LONG} is missing")
    if divided and kind in ("linear", "yarn") and factor != 1.0:
        raise ValueError(f"{keys.where}: rope scaling {kind} beside tensor {divided} is not supported")
    if divided == _LLAMA3:  # a divisor for each frequency, at any length
        divisors = _values(source, _LLAMA3)
        rope = {"short_factor": divisors, "long_factor": divisors, "original_max_position_embeddings": max_position}
        return {"rope_type": "longrope", **rope, "attention_factor": attention or 1.0}
    if divided == _LONG:
        rope = {"short_factor": _values(source, _SHORT), "long_factor": _values(source, _LONG)}
        rope |= _given(attention_factor=attention)
        return {"rope_type": "longrope", **rope, "original_max_position_embeddings": original}
    if kind == "yarn":
        return _yarn(keys, factor, original, attention or 1.0)
    if attention not in (None, 1.0):
        name = keys.name("rope.scaling.attn_factor")
        raise ValueError(f"{keys.where}: {name} is {attention:g} with rope scaling {kind}, which is not supported")
    return {"rope_type": "linear", "factor": factor} if kind == "linear" else {"rope_type": "default"}


def _yarn(keys: Keys, factor: float, original: int, more: float) -> dict[str, Any]:
    """`more` comes on top of the attention factor, which follows from the factor where the file gives none."""
    extrapolation, multiplier = keys("rope.scaling.yarn_ext_factor"), keys("rope.scaling.yarn_log_multiplier")
    if extrapolation not in (None, 1.0, -1.0):  # -1: llama.cpp's "not given"
        name = keys.name("rope.scaling.yarn_ext_factor")
        raise ValueError(f"{keys.where}: {name} is {extrapolation:g}; only 1 is supported")
    growth = 0.1 * math.log(max(factor, 1.0))
    attention = keys("rope.scaling.yarn_attn_factor") or (1 + growth) / (1 + growth * (multiplier or 0.0))
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    if keys.arch == "gpt-oss":
        rope["truncate"] = False  # the file has no key for it
    fast, slow = keys("rope.scaling.yarn_beta_fast"), keys("rope.scaling.yarn_beta_slow")
    return rope | _given(attention_factor=attention * more, beta_fast=fast, beta_slow=slow)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _values(source: Source, name: str) -> list[float]:
    tensor: Any = source.read(name)
    return [float(x) for x in tensor.flatten().tolist()]
