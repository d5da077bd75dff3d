"""What attention is held against: the formula in fp64, caches filled in awkward ways, and masks with holes.

Shape letters as in the package; Q queries of one sequence, L its keys.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexdecode.attention.attend import Backend, attend
from flexdecode.attention.backends.cpu import Cpu
from flexdecode.attention.backends.reference import Reference
from flexdecode.attention.backends.sdpa import Sdpa
from flexdecode.attention.cache import CacheLayer, KVCache
from flexdecode.attention.masks import UNBOUNDED, Mask, Span, causal, chunked, window
from flexdecode.attention.pages import GIVEN_BACK
from flexdecode.attention.plan import plan_attention
from flexdecode.attention.scores import ScoreMod

BACKENDS: tuple[Backend, ...] = (Reference(), Sdpa(), Cpu())
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Holes(Mask):
    """Causal, but every `period`-th query sees nothing at all. `exact` says so in the span, too."""

    period: int
    exact: bool = False

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (q_idx % self.period != 0)

    def span(self, q: int) -> Span:
        if not self.exact:
            return Span(0, q + 1, False)
        return Span(0, 0 if q % self.period == 0 else q + 1, True)

    def horizon(self, q: int) -> int:
        return 0


@dataclass(frozen=True)
class Stripes(Mask):
    """Causal, every `step`-th key from `first` on: not an interval."""

    step: int
    first: int = 0

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (kv_idx % self.step == 0) & (kv_idx >= self.first)

    def span(self, q: int) -> Span:
        return Span(0, q + 1, False)

    def horizon(self, q: int) -> int:
        return 0


@dataclass(frozen=True)
class Keys(Mask):
    """Keys from `first` on, to every query: the mask_mod does not look at q_idx and returns a single row."""

    first: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx >= self.first

    def span(self, q: int) -> Span:
        return Span(0, UNBOUNDED, False)

    def horizon(self, q: int) -> int:
        return 0


MASKS: dict[str, Mask] = {
    "causal": causal(),
    "window5": causal() & window(5),
    "window70": causal() & window(70),
    "chunked16": causal() & chunked(16),
    "keys": Keys(3),
    "all": window(100_000),  # no causality: every query sees every key
}


def visible(mask: Mask, positions: Tensor, length: int) -> Tensor:
    """bool [Q, L], by asking the mask for each pair."""
    zero = torch.tensor(0)
    seen = mask(zero, zero, positions[:, None], torch.arange(length)[None, :])
    return seen.expand(len(positions), length)


def dense(
    q_QHD: Tensor,
    k_LCD: Tensor,
    v_LCD: Tensor,
    visible_QL: Tensor,
    *,
    scale: float | None = None,
    score: ScoreMod | None = None,
    sinks_H: Tensor | None = None,
    positions_Q: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale) v with nothing shared, skipped or rounded: out fp64 [Q, H, D], lse fp64 [Q, H]."""
    queries, heads, dim = q_QHD.shape
    group = heads // k_LCD.shape[1]
    out = torch.zeros(queries, heads, v_LCD.shape[2], dtype=torch.float64)
    lse = torch.full((queries, heads), float("-inf"), dtype=torch.float64)
    for h in range(heads):
        k, v = k_LCD[:, h // group].double(), v_LCD[:, h // group].double()
        s_QL = q_QHD[:, h].double() @ k.T * (dim**-0.5 if scale is None else scale)
        if score is not None:
            assert positions_Q is not None
            kv_idx = torch.arange(len(k))[None, :]
            s_QL = score(s_QL, torch.tensor(0), torch.tensor(h), positions_Q[:, None], kv_idx)
        for i in range(queries):
            s = s_QL[i][visible_QL[i]]
            terms = s if sinks_H is None else torch.cat([s, sinks_H[h].double()[None]])
            if len(terms):
                lse[i, h] = terms.logsumexp(0)
                out[i, h] = (s - lse[i, h]).exp() @ v[visible_QL[i]]
    return out, lse


def tolerance(dtype: torch.dtype, weighted: Tensor) -> Tensor:
    """How far a result in `dtype` may be from the formula: its own rounding, that of each probability and of each
    product, all in units of `weighted`, the same attention over |v|."""
    return 4 * ROUNDOFF[dtype] * weighted + 1e-5


@dataclass
class Filled:
    """A cache of random keys and values, and what it holds: k, v [L, C, D] by sequence, as stored."""

    cache: KVCache
    sequences: list[int]
    k: list[Tensor]
    v: list[Tensor]


def filled(
    lengths: Sequence[int],
    mask: Mask,
    *,
    last: Sequence[int] | None = None,
    kv_heads: int = 2,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    rest: float | None = None,
    scattered: int = 0,
    seed: int = 0,
) -> Filled:
    """One layer under `mask`. The last `last[i]` tokens come in one step (default: all), those before in pieces.

    `rest` fills every slot that holds no token, before and after. `scattered` tears the sequences' pages apart, each
    number in another way. A sequence's contents depend on `seed`, its index and the shapes only.
    """
    dice = random.Random(scattered)
    tokens = sum(lengths) + page * (4 + 4 * len(lengths))
    cache = KVCache([CacheLayer(kv_heads, head_dim, mask, v_head_dim)], 3 * tokens, page=page, dtype=dtype)
    if rest is not None:
        fill_unused(cache, rest)
    k, v = [], []
    for i, n in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * seed + i)
        k.append(torch.randn(n, kv_heads, head_dim, generator=generator))
        v.append(torch.randn(n, kv_heads, v_head_dim or head_dim, generator=generator))
    sequences = [cache.new() for _ in lengths]
    done = [0] * len(lengths)
    ends = [n - (n if last is None else last[i]) for i, n in enumerate(lengths)]
    decoys = []

    def put(jobs: list[tuple[int, int]]) -> None:
        slots = cache.append([sequences[i] for i, _ in jobs], [n for _, n in jobs])
        parts = [slice(done[i], done[i] + n) for i, n in jobs]
        cache.write(
            0,
            slots,
            torch.cat([k[i][p] for (i, _), p in zip(jobs, parts, strict=True)]),
            torch.cat([v[i][p] for (i, _), p in zip(jobs, parts, strict=True)]),
        )
        for i, n in jobs:
            done[i] += n

    if scattered:  # pages go lowest first; taken out of order by freeing decoys out of order
        for _ in range(tokens // page):
            decoys.append(cache.new())
            cache.append([decoys[-1]], [dice.randint(1, 2 * page)])
        dice.shuffle(decoys)
    while any(a < b for a, b in zip(done, ends, strict=True)):
        i = dice.choice([i for i, end in enumerate(ends) if done[i] < end])
        put([(i, min(dice.randint(1, page), ends[i] - done[i]))])
        if decoys:
            cache.free(decoys.pop())
    for decoy in decoys[: len(decoys) // 2]:
        cache.free(decoy)
    put([(i, n - done[i]) for i, n in enumerate(lengths)])
    for decoy in decoys[len(decoys) // 2 :]:
        cache.free(decoy)
    if rest is not None:
        fill_unused(cache, rest)
    return Filled(cache, sequences, [x.to(dtype) for x in k], [x.to(dtype) for x in v])


def queries(q_lens: Sequence[int], heads: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Packed random queries [T, H, D], the same every time; a slice of a packed q, k and v, as the decoder has it."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(sum(q_lens), heads + 3, dim, generator=generator).to(dtype)[:, :heads]


def run(f: Filled, q_THD: Tensor, q_lens: Sequence[int], mask: Mask, backend: Backend, **options: Any) -> Tensor:
    """attend over all sequences of `f`."""
    plan = plan_attention(f.cache, f.sequences, q_lens, mask)
    out = attend(q_THD, f.cache, 0, plan, backend=backend, **options)
    assert isinstance(out, Tensor)
    return out


def check(
    out_THD: Tensor, f: Filled, q_THD: Tensor, q_lens: Sequence[int], mask: Mask, slack: float = 0.0, **options: Any
) -> None:
    """Every row within `tolerance` of the formula. `slack` is how far a score may be off, where scores are large."""
    row = 0
    for k, v, count in zip(f.k, f.v, q_lens, strict=True):
        seen = visible(mask, torch.arange(len(k) - count, len(k)), len(k))
        q = q_THD[row : row + count]
        wanted, _ = dense(q, k, v, seen, **options)
        weighted, _ = dense(q, k, v.abs(), seen, **options)
        got = out_THD[row : row + count]
        assert got.dtype == q_THD.dtype
        limit = tolerance(q_THD.dtype, weighted) + weighted * math.expm1(2 * slack)
        assert bool(((got.double() - wanted).abs() <= limit).all())
        row += count


def fill_unused(cache: KVCache, value: float) -> None:
    """Write `value` into every slot of every layer that holds no token: free pages, and what follows the last token."""
    for layer, index in enumerate(cache.group_of):
        group = cache.groups[index]
        unused = torch.ones(group.pages, cache.page, dtype=torch.bool)
        for sequence, length in cache.lengths.items():
            for logical, number in enumerate(group.table(sequence)):
                if number != GIVEN_BACK:
                    unused[number, : max(0, length - logical * cache.page)] = False
        for storage in (cache._k[layer], cache._v[layer]):
            if storage.scale_CS is not None:
                storage.scale_CS[:, unused.flatten()] = value
            else:
                storage.data_CSD[:, unused.flatten()] = value
