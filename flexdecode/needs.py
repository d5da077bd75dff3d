"""What a model needs in memory, known before a weight is read, and the room that its cache gets.

Bytes are bytes. Knows headers, masks and how much is free; reads no weight and holds no cache.
"""

from __future__ import annotations

import math

import torch

from flexdecode.attention.mods import Mods
from flexdecode.attention.sizing import Sizing
from flexdecode.checkpoints.source import Source
from flexdecode.config import EngineConfig, ModelConfig
from flexdecode.families.rules import Rules, file_names
from flexdecode.memory import read_size, size

_SHARE = 0.5  # of what is free beside the weights, for the cache, where nothing else is asked
_SEQUENCES = 4  # by default the cache holds so many sequences of full length, memory permitting


def weights_held(source: Source, table: Rules, dtype: torch.dtype) -> int:
    """About how many bytes the weights take once loaded: floats in `dtype`, vectors in fp32, integers as they are."""
    present = frozenset(source.names())
    parts = [part for rule in table.values() for part in rule.all()]
    return sum(_held(source, name, dtype) for name in {name for part in parts for name in file_names(part, present)})


def _held(source: Source, name: str, dtype: torch.dtype) -> int:
    shape, stored = source.shape(name), source.nbytes(name)
    count = math.prod(shape)
    if len(shape) == 1:
        return 4 * count
    return count * dtype.itemsize if stored >= 2 * count else stored


def sizing(config: ModelConfig, kv_dtype: torch.dtype, mods: Mods | None = None) -> Sizing:
    """How much room sequences of this model take under `mods`."""
    layers = (mods or Mods()).cache_layers(config.layers)
    chunk = EngineConfig.prefill_chunk if all(layer.mask.looks_back for layer in layers) else None
    return Sizing(layers, kv_dtype, EngineConfig.page, chunk)


def settle(
    where: str,
    sizes: Sizing,
    weights: int,
    free: int,
    most: int,
    max_context: int | None,
    kv_memory: int | str | None,
    ignore_memory: bool,
) -> EngineConfig:
    """The context and the cache: as asked, else what the model allows (`most` tokens) and half of what is free beside
    the weights holds. `where` names the model, `free` are bytes, `kv_memory` bytes or a text as for `--kv-memory`.

    Raises ValueError, with both numbers, where what was asked does not fit into `free`, unless `ignore_memory`, or not
    together.
    """
    left, first = max(0, free - weights), min(most, sizes.page) if max_context is None else max_context
    asked = None if kv_memory is None else _asked(kv_memory, left)
    least = sizes.nbytes(sizes.one(first))
    if weights + least > free and not ignore_memory:
        smaller = max_context is None or weights + sizes.nbytes(sizes.one(1)) > free
        remedy = "smaller or int4 weights" if smaller else "a smaller max_context (--max-context)"
        raise ValueError(
            f"{where}: about {size(weights)} of weights and {size(least)} of cache for {first} tokens make "
            f"{size(weights + least)}, and {size(free)} of memory are free; take {remedy}, or load it all the same "
            "with ignore_memory (--ignore-memory)"
        )
    if asked is not None and least > asked:
        raise ValueError(_too_small(sizes, kv_memory, asked, least, most, max_context))
    if asked is not None and weights + asked > free and not ignore_memory:
        raise ValueError(
            f"{where}: about {size(weights)} of weights and kv_memory={kv_memory} make {size(weights + asked)}, and "
            f"{size(free)} of memory are free; give kv_memory (--kv-memory) at most {left} bytes, or load it all the "
            "same with ignore_memory (--ignore-memory)"
        )
    budget = int(left * _SHARE) if asked is None else asked
    context = (sizes.longest(budget, most) or first) if max_context is None else max_context
    budget = max(budget, sizes.nbytes(sizes.one(context)))
    pages = sizes.cut(budget, context, _SEQUENCES, EngineConfig.max_running, greedy=asked is not None)
    room = tuple(count * sizes.page for count in pages)
    return EngineConfig(max_context=context, kv_tokens=max(room), page=sizes.page, kv_tokens_by_group=room)


def _asked(kv_memory: int | str, left: int) -> int:
    if isinstance(kv_memory, str):
        return read_size(kv_memory, left, "kv_memory (--kv-memory)")
    if kv_memory < 1:
        raise ValueError(f"kv_memory must be at least 1 byte, got {kv_memory}")
    return kv_memory


def _too_small(
    sizes: Sizing, kv_memory: int | str | None, asked: int, least: int, most: int, max_context: int | None
) -> str:
    if max_context is None:
        return (
            f"kv_memory={kv_memory} is {size(asked)}, and a page of {sizes.page} tokens takes {size(least)}; give more "
            "(--kv-memory)"
        )
    longest = sizes.longest(asked, most)
    shorter = f"ask for at most {longest} tokens (--max-context), or " if longest else ""
    return (
        f"max_context={max_context} takes {size(least)} of cache, and kv_memory={kv_memory} allows {size(asked)}; "
        f"{shorter}give at least {least} bytes (--kv-memory)"
    )
