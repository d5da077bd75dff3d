"""What one decode step reads, and the least time in which this machine could read it.

Decoding one sequence reads every weight once and every visible key and value once, so the floor of a step is those
bytes over the rate at which memory is read, measured here and now with the same threads. Knows token ids only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from flexdecode.attention.cache import CacheLayer, bytes_per_token
from flexdecode.attention.explain import keys_seen
from flexdecode.attention.plan import plan_tiles
from flexdecode.generation.engine import Engine
from flexdecode.generation.params import SamplingParams
from flexdecode.kernels import ops
from flexdecode.models.decoder import Decoder
from flexdecode.models.embedding import Embedding
from flexdecode.models.linear import Linear
from flexdecode.models.moe import Moe
from flexdecode.models.norm import RMSNorm

_LEAST_READ = 256 << 20  # bytes: more than the processor's caches hold
_MOST_READ = 1 << 30
_REPETITIONS = 7


@dataclass(frozen=True)
class KvRead:
    """What the layers under one mask read of the cache in a step. `keys` of the step's tokens are visible to some query
    head, on average over kv heads."""

    mask: str
    layers: int
    keys: float
    read_bytes: int
    skipped_bytes: int


@dataclass(frozen=True)
class Explanation:
    """One decode step of one sequence, at `context` tokens, the step's own included.

    `experts` are those that a token uses and those there are, in a mixture of experts; the weights count those used.
    `read_bytes_per_second` was measured when this was made. `step_seconds` is the median of real steps, None where none
    was measured.
    """

    context: int
    weights_bytes: int
    experts: tuple[int, int] | None
    kv: tuple[KvRead, ...]
    read_bytes_per_second: float
    step_seconds: float | None = None

    @property
    def kv_bytes(self) -> int:
        return sum(x.read_bytes for x in self.kv)

    @property
    def kv_skipped_bytes(self) -> int:
        return sum(x.skipped_bytes for x in self.kv)

    @property
    def floor_seconds(self) -> float:
        return (self.weights_bytes + self.kv_bytes) / self.read_bytes_per_second

    @property
    def floor_tokens_per_second(self) -> float:
        return 1 / self.floor_seconds

    @property
    def fraction_of_floor(self) -> float | None:
        """The floor over the time taken: 1 is as quick as memory allows."""
        return None if self.step_seconds is None else self.floor_seconds / self.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """Every figure, as plain data."""
        names = ("kv_bytes", "kv_skipped_bytes", "floor_seconds", "floor_tokens_per_second", "fraction_of_floor")
        return asdict(self) | {name: getattr(self, name) for name in names}


def explain_step(engine: Engine, context: int, measure: bool = False) -> Explanation:
    """Explain a decode step at `context` tokens; with `measure` time the steps that lead up to it, reads between them.

    Raises ValueError where the engine's context ends before, where there is nothing to decode yet, and with `measure`
    where other requests are running.
    """
    limit = engine.config.max_context
    least = 4 if measure else 2
    if not least <= context <= limit:
        what = "measured" if measure else "explained"
        raise ValueError(f"a decode step at {context} tokens cannot be {what}: wants {least} to {limit} (max_context)")
    if measure and engine.busy:
        raise ValueError("a decode step cannot be measured while requests are running; let them end first")
    weights, experts = _weights(engine.model)
    kv = _kv(engine.model, context)
    nbytes = weights + sum(x.read_bytes for x in kv)
    words = torch.ones(min(max(nbytes, _LEAST_READ), _MOST_READ) // 8, dtype=torch.int64, device=engine.model.device)
    words = ops.held(words, words.dtype, words.device)  # in the kind of memory in which weights lie
    steps, reads = _times(engine, context if measure else None, lambda: words.sum())
    step = median(steps) if steps else None
    return Explanation(context, weights, experts, kv, words.nbytes / median(reads), step)


def _weights(model: Decoder) -> tuple[int, tuple[int, int] | None]:
    """Bytes of weights that a step of one token reads, and (experts used, experts)."""
    mixtures = [m.config for m in model.modules() if isinstance(m, Moe)]
    return _read(model), (mixtures[0].experts_per_token, mixtures[0].experts) if mixtures else None


def _read(module: nn.Module) -> int:
    if isinstance(module, Linear):
        return module.nbytes  # counts its own parts
    if isinstance(module, RMSNorm):
        return module.weight.nbytes
    if isinstance(module, Moe):
        return module.read_bytes
    if isinstance(module, Embedding):
        return module.row_bytes
    return sum(_read(child) for child in module.children())


def _kv(model: Decoder, context: int) -> tuple[KvRead, ...]:
    """What the newest token reads of the cache, by mask; layers of one mask and different shapes stand apart."""
    heads = [layer.attention.heads for layer in model.config.layers]
    shapes: Counter[tuple[CacheLayer, int]] = Counter(zip(model.cache_layers(), heads, strict=True))
    found = []
    for (layer, query_heads), count in shapes.items():
        q_idx = np.array([context - 1])
        tiles = plan_tiles(layer.mask, q_idx, context, heads=query_heads, kv_heads=layer.kv_heads)
        seen = keys_seen(tiles, layer.kv_heads)
        each = count * bytes_per_token(layer, model.kv_dtype) // layer.kv_heads
        skipped = context * layer.kv_heads - seen
        found.append(KvRead(str(layer.mask), count, seen / layer.kv_heads, seen * each, skipped * each))
    return tuple(found)


def _times(engine: Engine, context: int | None, read: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Seconds of steps and of reads, in turn so that both see the same machine, after one of each to warm up."""
    if context is None:
        return [], [_seconds(read) for _ in range(_REPETITIONS + 1)][1:]
    count = min(_REPETITIONS + 1, context - 2)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, engine.model.config.vocab_size, (context - count - 1,), generator=generator).tolist()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count + 1).resolve({})
    request = engine.add(prompt, params)
    request.speculator = None  # a step is one token's
    try:
        while not request.output_ids and request.error is None:  # the prefill
            engine.step()
        pairs = [(_seconds(engine.step), _seconds(read)) for _ in range(count)][1:]
    finally:
        engine.abort(request)
    if request.error is not None:
        raise request.error
    return [step for step, _ in pairs], [reading for _, reading in pairs]


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
