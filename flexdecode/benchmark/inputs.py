"""Random keys, values and queries of a case, in a cache filled as an engine fills it, and the works on them.

A decoding case lies in memory as many times as it takes for no call to find it in a cache: a model's other layers are
between one call and the next, too. All are layers of one cache and share one plan. Shape letters as in plan.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flexdecode.attention.attend import attend
from flexdecode.attention.cache import CacheLayer, KVCache, bytes_per_token
from flexdecode.attention.masks import UNBOUNDED, Ints, Queries
from flexdecode.attention.plan import AttentionPlan, plan_attention
from flexdecode.attention.request import Backend
from flexdecode.attention.visible import keys_held
from flexdecode.benchmark.cases import Case
from flexdecode.benchmark.ceilings import copies
from flexdecode.benchmark.work import visible_pairs

_SLAB = 4096  # tokens written at a time
_PAGE = 64
_WORK_BYTES = 1 << 30  # room for what is computed in between, beside keys, values and queries


@dataclass(frozen=True)
class Inputs:
    """A case ready to run."""

    case: Case
    cache: KVCache
    sequence: int
    q_THD: Tensor
    plan: AttentionPlan

    def attention(self, backend: Backend) -> Callable[[], Tensor]:
        """Attention by `backend`, of another layer at each call."""
        layers = itertools.cycle(range(len(self.cache.layers)))
        return lambda: self.attend(backend, next(layers))

    def attend(self, backend: Backend, layer: int = 0) -> Tensor:
        out = attend(self.q_THD, self.cache, layer, self.plan, score=self.case.score, backend=backend)
        assert isinstance(out, Tensor)
        return out

    def attend_rows(self, backend: Backend, rows: Ints) -> Tensor:
        """fp32 attention of these rows of q alone, in the first layer."""
        q_idx = torch.from_numpy(rows + self.case.keys - self.case.queries)
        plan = plan_attention(self.cache, [self.sequence], [len(rows)], self.case.mask, [q_idx], heads=self.case.heads)
        q = self.q_THD[torch.from_numpy(rows)].float()
        out = attend(q, self.cache, 0, plan, score=self.case.score, backend=backend)
        assert isinstance(out, Tensor)
        return out

    def torch_sdpa(self) -> Callable[[], Tensor]:
        """torch's own grouped attention, as its users call it on [1, heads, length, dim]: causal, all keys."""
        slots = self.plan.tiles[0].slots(np.arange(self.case.keys), self.cache.page)
        q = self.q_THD.transpose(0, 1)[None].contiguous()
        layers = [self.cache.kv(layer).read(slots, q.dtype) for layer in range(len(self.cache.layers))]
        both = itertools.cycle([(k[None], v[None]) for k, v in layers])
        causal = len(self.q_THD) > 1

        def run() -> Tensor:
            k, v = next(both)
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

        return run

    def visible_bytes(self) -> int:
        """Of keys, values and scales that one call must read."""
        kv_heads = self.case.kv_heads
        return self.plan.visible_keys(kv_heads) * bytes_per_token(self.cache.layers[0], self.case.kv_dtype) // kv_heads

    def flops(self) -> int:
        """What one call must multiply: 4 · head_dim for each visible pair of query and key and each head."""
        case = self.case
        return 4 * case.head_dim * visible_pairs(self.plan.tiles, case.heads, case.kv_heads)


def build(case: Case) -> Inputs:
    """The same numbers, whatever the dtype of the cache."""
    layers = 1 if case.multiplies else copies(_layer_bytes(case))
    layer = CacheLayer(case.kv_heads, case.head_dim, case.mask)
    cache = KVCache([layer] * layers, _tokens(case), page=_PAGE, dtype=case.kv_dtype)
    sequence = cache.new()
    generator = torch.Generator().manual_seed(0)
    before = case.keys - case.queries
    edges = [*range(0, before, _SLAB), before, case.keys] if before else [0, case.keys]
    for start, stop in itertools.pairwise(edges):
        slots = cache.append([sequence], [stop - start])
        k, v = (torch.randn(stop - start, case.kv_heads, case.head_dim, generator=generator) for _ in range(2))
        # What no query sees need not be written: under a window a long context is mostly that.
        seen = case.mask.sees(Queries(before, UNBOUNDED), np.array([start]), np.array([stop])).some[0]
        for index in range(layers if seen else 0):
            cache.write(index, slots, k, v)
    q_THD = torch.randn(case.queries, case.heads, case.head_dim, generator=generator).bfloat16()
    plan = plan_attention(cache, [sequence], [case.queries], case.mask, heads=case.heads)
    return Inputs(case, cache, sequence, q_THD, plan)


def needed_bytes(case: Case) -> int:
    """About what it takes to measure a case: its keys and values, a reader of as many bytes, the reference's in fp32,
    its twins', and room to compute in."""
    cached = _layer_bytes(case)
    exact = _held(case) * case.kv_heads * case.head_dim * 2 * 4
    q = case.queries * case.heads * case.head_dim * 12
    own = (
        2 * cached * (1 if case.multiplies else copies(cached)) + exact * (2 if case.kv_dtype == torch.int8 else 1) + q
    )
    return own + sum(needed_bytes(twin) - _WORK_BYTES for _, twin in case.twins) + _WORK_BYTES


def _held(case: Case) -> int:
    """Keys that must be in the cache when the case's first query is asked."""
    return min(case.keys, keys_held(case.mask, case.keys) + case.queries)


def _layer_bytes(case: Case) -> int:
    return _held(case) * bytes_per_token(CacheLayer(case.kv_heads, case.head_dim, case.mask), case.kv_dtype)


def _tokens(case: Case) -> int:
    """Room for what is held while the cache is filled. A window's keys move on by a slab at a time."""
    return min(case.keys, _held(case) + 2 * _SLAB)
