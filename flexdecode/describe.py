"""What a model is and needs, in plain data: from headers alone, and with the backends that were chosen once loaded.

Bytes are bytes; keys that end in `_bytes` say so.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from flexdecode.attention.cache import bytes_per_token
from flexdecode.attention.mods import Mods
from flexdecode.checkpoints.source import Source
from flexdecode.config import AttentionConfig, LayerConfig, MlpConfig, ModelConfig
from flexdecode.families.names import Names
from flexdecode.families.rules import check, file_names, rules
from flexdecode.models.decoder import Decoder
from flexdecode.models.linear import Linear
from flexdecode.needs import sizing, weights_held


def describe_checkpoint(
    source: Source, config: ModelConfig, names: Names, kv_dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Family, shape, attention kinds, bytes by part and the cache's growth, without reading a weight. Raises ValueError
    where tensors do not fit."""
    present = frozenset(source.names())
    table = rules(config, names, present)
    check(table, names, source)
    parts: Counter[str] = Counter()
    counted: set[str] = set()
    for target, rule in table.items():
        for part in rule.all():
            for name in file_names(part, present):
                if name not in counted:
                    counted.add(name)
                    parts[_part_of(target)] += source.nbytes(name)
    weights = sum(parts.values())
    return {
        "family": config.family,
        "format": source.format,
        "layers": len(config.layers),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "attention": kinds([attention_kind(x.attention) for x in config.layers]),
        "feed_forward": kinds([_feed_forward_kind(x) for x in config.layers]),
        "tied_embedding": "head" not in table,
        "max_position": config.max_position,
        "weights_bytes": weights,
        "bytes_by_part": {f"{name}_bytes": size for name, size in parts.items()},
        "kv_bytes_per_token": sum(bytes_per_token(x, kv_dtype) for x in Mods().cache_layers(config.layers)),
    }


def describe_needs(
    source: Source,
    config: ModelConfig,
    names: Names,
    max_context: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    free: int,
) -> dict[str, Any]:
    """What the model takes once loaded, about, and one sequence of `max_context` tokens in its cache: layers under a
    window keep the window and a step's tokens. Beside the `free` bytes."""
    weights = weights_held(source, rules(config, names, frozenset(source.names())), dtype)
    sizes = sizing(config, kv_dtype)
    cache = sizes.nbytes(sizes.one(max_context))
    return {
        "max_context": max_context,
        "weights_held_bytes": weights,
        "kv_dtype": str(kv_dtype).removeprefix("torch."),
        "kv_bytes": cache,
        "weights_and_kv_bytes": weights + cache,
        "free_bytes": free,
        "fits": weights + cache <= free,
    }


def describe_decoder(model: Decoder) -> dict[str, Any]:
    """What loading has decided: types, how weights are held, which backend serves which layers."""
    held: Counter[str] = Counter()
    _count(model, held)
    backends = [(attention_kind(layer.attention.config), str(layer.attention.backends)) for layer in model.layers]
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(model.kv_dtype).removeprefix("torch."),
        "device": str(model.device),
        "weights_bytes": model.weight_bytes,
        "held_as": {f"{kind} bytes": size for kind, size in held.items()},
        "attention_backends": dict(backends),
    }


def _count(module: Any, held: Counter[str]) -> None:
    if isinstance(module, Linear):
        held[module.kind] += module.nbytes
        return
    for child in module.children():
        _count(child, held)


def attention_kind(a: AttentionConfig) -> str:
    """`full` or `sliding(W)` or `chunked(C)`, with what else is out of the ordinary."""
    kind = f"sliding({a.window})" if a.window else f"chunked({a.chunk})" if a.chunk else "full"
    extras = [f"softcap {a.softcap:g}"] if a.softcap else []
    extras += ["sinks"] if a.sinks else []
    extras += ["no rope"] if a.rope is None else []
    return " + ".join([kind, *extras]) + f", {a.heads} heads, {a.kv_heads} kv heads of {a.head_dim}"


def _feed_forward_kind(layer: LayerConfig) -> str:
    ff = layer.feed_forward
    if isinstance(ff, MlpConfig):
        return f"mlp {ff.intermediate_size} ({ff.activation})"
    return f"{ff.experts} experts of {ff.intermediate_size}, {ff.experts_per_token} a token ({ff.activation})"


def kinds(each: list[str]) -> list[str]:
    """`5 x sliding(512) …`, in the order of first appearance."""
    return [f"{count} x {kind}" for kind, count in Counter(each).items()]


def _part_of(target: str) -> str:
    if not target.startswith("layers."):
        return {"embed": "embedding", "norm": "norms"}.get(target, target)
    name = target.split(".", 2)[2]
    if name in ("qkv", "out", "sinks"):
        return "attention"
    return "norms" if name.endswith("norm") else "feed_forward"
