"""What attention is held against: the formula in fp64, caches filled in awkward ways, and awkward masks.

Shape letters as in the package; Q queries of one sequence, L its keys.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexdecode.attention.attend import attend
from flexdecode.attention.backends.cpu import Cpu
from flexdecode.attention.backends.reference import Reference
from flexdecode.attention.backends.sdpa import Sdpa
from flexdecode.attention.cache import CacheLayer, KVCache
from flexdecode.attention.masks import Ints, Mask, Queries, Seen, causal, chunked, window
from flexdecode.attention.pages import GIVEN_BACK
from flexdecode.attention.plan import plan_attention
from flexdecode.attention.request import Backend
from flexdecode.attention.scores import ScoreMod

BACKENDS: tuple[Backend, ...] = (Reference(), Sdpa(), Cpu())
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Holes(Mask):
    """Causal, but every `period`-th query sees nothing at all. `exact` says so for blocks, too."""

    period: int
    exact: bool = False

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (q_idx % self.period != 0)

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        lone = q.stop - q.first == 1
        blind = self.exact and lone and q.first % self.period == 0
        every = self.exact and lone and not blind
        return Seen((first_N < q.stop) & (not blind), (stop_N <= q.first + 1) & every)


@dataclass(frozen=True)
class Stripes(Mask):
    """Causal, every `step`-th key from `first` on: not an interval, and it cannot answer for a block."""

    step: int
    first: int = 0

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (kv_idx % self.step == 0) & (kv_idx >= self.first)

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        return Seen(first_N < q.stop, np.zeros(len(first_N), np.bool_))


@dataclass(frozen=True)
class Keys(Mask):
    """Keys from `first` on, to every query: the mask_mod does not look at q_idx and returns a single row."""

    first: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx >= self.first

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        return Seen(np.ones(len(first_N), np.bool_), np.zeros(len(first_N), np.bool_))


@dataclass(frozen=True)
class Ends(Mask):
    """Causal, the first `first` keys and the last `last`: what lies between, no later query sees."""

    first: int
    last: int

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & ((kv_idx < self.first) | (q_idx - kv_idx < self.last))

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        some = (first_N < self.first) | (stop_N > q.first - self.last + 1)
        every = (stop_N <= self.first) | (first_N >= q.stop - self.last)
        return Seen((first_N < q.stop) & some, (stop_N <= q.first + 1) & every)


@dataclass(frozen=True)
class ByBatch(Mask):
    """Causal, without every (b + 2)-th key."""

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (kv_idx % (b + 2) != 0)

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        return Seen(first_N < q.stop, np.zeros(len(first_N), np.bool_))


@dataclass(frozen=True)
class ByHead(Mask):
    """Head h has the mask number h modulo how many there are. `opaque`: it cannot say which, as a user's function."""

    masks: tuple[Mask, ...]
    opaque: bool = False

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        shown = self.masks[0](b, h, q_idx, kv_idx)
        for i, mask in enumerate(self.masks[1:], start=1):
            shown = torch.where(h % len(self.masks) == i, mask(b, h, q_idx, kv_idx), shown)
        return shown

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        seen = [mask.sees(q, first_N, stop_N) for mask in self.masks]
        return Seen(np.any([s.some for s in seen], axis=0), np.all([s.every for s in seen], axis=0))

    @property
    def per_head(self) -> bool:
        return True

    def head(self, h: int) -> Mask:
        return self if self.opaque else self.masks[h % len(self.masks)]


@dataclass(frozen=True)
class Blurred(Mask):
    """What `inner` shows, by a mask that cannot answer for any block."""

    inner: Mask

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.inner(b, h, q_idx, kv_idx)

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        return Seen(np.ones(len(first_N), np.bool_), np.zeros(len(first_N), np.bool_))

    @property
    def per_head(self) -> bool:
        return self.inner.per_head

    def head(self, h: int) -> Mask:
        return Blurred(self.inner.head(h))


@dataclass(frozen=True)
class Counting(Mask):
    """What `inner` shows, keeping count: blocks that were asked for, and keys that were evaluated, by call."""

    inner: Mask
    blocks: list[int] = field(default_factory=list, compare=False)
    keys: list[int] = field(default_factory=list, compare=False)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        self.keys.append(kv_idx.numel())
        return self.inner(b, h, q_idx, kv_idx)

    def sees(self, q: Queries, first_N: Ints, stop_N: Ints) -> Seen:
        self.blocks.append(len(first_N))
        return self.inner.sees(q, first_N, stop_N)


MASKS: dict[str, Mask] = {
    "causal": causal(),
    "window5": causal() & window(5),
    "window70": causal() & window(70),
    "chunked16": causal() & chunked(16),
    "keys": Keys(3),
    "all": window(100_000),  # no causality: every query sees every key
    "ends": Ends(20, 40),
    "by_batch": ByBatch(),
    "by_head": ByHead((causal(), causal() & window(9), Stripes(3))),
    "function_of_heads": ByHead((causal() & window(33), Holes(2)), opaque=True),
}


def visible(mask: Mask, positions: Tensor, length: int, *, heads: int | None = None, batch: int = 0) -> Tensor:
    """bool [Q, L], or [H, Q, L] for so many heads, by asking the mask for each."""
    h = torch.tensor(0) if heads is None else torch.arange(heads)[:, None, None]
    seen = mask(torch.tensor(batch), h, positions[:, None], torch.arange(length)[None, :])
    return seen.expand(*(() if heads is None else (heads,)), len(positions), length)


def dense(
    q_QHD: Tensor,
    k_LCD: Tensor,
    v_LCD: Tensor,
    visible_HQL: Tensor,
    *,
    scale: float | None = None,
    score: ScoreMod | None = None,
    sinks_H: Tensor | None = None,
    positions_Q: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale) v with nothing shared, skipped or rounded: out fp64 [Q, H, D], lse fp64 [Q, H]. What is
    visible may be [Q, L] for all heads."""
    _, heads, dim = q_QHD.shape
    group = heads // k_LCD.shape[1]
    k_HLD, v_HLD = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k_LCD, v_LCD))
    s_HQL = q_QHD.double().transpose(0, 1) @ k_HLD.mT * (dim**-0.5 if scale is None else scale)
    if score is not None:
        assert positions_Q is not None
        h, kv_idx = torch.arange(heads)[:, None, None], torch.arange(len(k_LCD))
        s_HQL = score(s_HQL, torch.tensor(0), h, positions_Q[:, None], kv_idx)
    s_HQL = s_HQL.masked_fill(~visible_HQL, -math.inf)
    lse_HQ = s_HQL.logsumexp(-1)
    if sinks_H is not None:
        lse_HQ = torch.logaddexp(lse_HQ, sinks_H.double()[:, None])
    p_HQL = (s_HQL - lse_HQ.nan_to_num(neginf=0.0)[..., None]).exp()
    return (p_HQL @ v_HLD).transpose(0, 1), lse_HQ.T


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
    plan = plan_attention(f.cache, f.sequences, q_lens, mask, heads=q_THD.shape[1])
    out = attend(q_THD, f.cache, 0, plan, backend=backend, **options)
    assert isinstance(out, Tensor)
    return out


def check(
    out_THD: Tensor, f: Filled, q_THD: Tensor, q_lens: Sequence[int], mask: Mask, slack: float = 0.0, **options: Any
) -> None:
    """Every row within `tolerance` of the formula. `slack` is how far a score may be off, where scores are large."""
    row = 0
    for i, (k, v, count) in enumerate(zip(f.k, f.v, q_lens, strict=True)):
        seen = visible(mask, torch.arange(len(k) - count, len(k)), len(k), heads=q_THD.shape[1], batch=i)
        q = q_THD[row : row + count]
        wanted, _ = dense(q, k, v, seen, **options)
        weighted, _ = dense(q, k, v.abs(), seen, **options)
        got = out_THD[row : row + count]
        assert got.dtype == q_THD.dtype
        limit = tolerance(q_THD.dtype, weighted) + weighted * math.expm1(2 * slack)
        assert bool(((got.double() - wanted).abs() <= limit).all())
        row += count


def slots_of(cache: KVCache, layer: int, sequence: int, start: int, stop: int) -> Ints:
    """Where keys start … stop - 1 of a sequence lie in a layer; an error where one was given back."""
    return cache.groups[cache.group_of[layer]].slots(sequence, np.arange(start, stop))


def held(
    cache: KVCache, layer: int, sequence: int, start: int, stop: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Keys and values [C, L, D] of positions start … stop - 1, read back."""
    return cache.kv(layer).read(slots_of(cache, layer, sequence, start, stop), dtype)


def overwrite(cache: KVCache, layer: int, slots_L: Ints, value: float) -> None:
    """Put `value` over keys and values of a layer, whatever they are stored as."""
    kv, slots = cache.kv(layer), torch.from_numpy(slots_L)
    for data, scale in ((kv.k_CSD, kv.k_scale_CS), (kv.v_CSD, kv.v_scale_CS)):
        (data if scale is None else scale)[:, slots] = value


def fill_unused(cache: KVCache, value: float) -> None:
    """Write `value` into every slot of every layer that holds no token: free pages, and what follows the last token."""
    for layer, index in enumerate(cache.group_of):
        group = cache.groups[index]
        unused = torch.ones(group.pages, cache.page, dtype=torch.bool)
        for sequence, length in cache.lengths.items():
            for logical, number in enumerate(group.table(sequence)):
                if number != GIVEN_BACK:
                    unused[number, : max(0, length - logical * cache.page)] = False
        overwrite(cache, layer, np.flatnonzero(unused.flatten().numpy()), value)


def state(cache: KVCache) -> Any:
    """All that a cache knows of its sequences and pages."""
    tables = [[g.table(s) for s in sorted(cache.lengths)] for g in cache.groups]
    return (
        cache.lengths,
        tables,
        [sorted(g.pool._free) for g in cache.groups],
        [list(g.pool._references) for g in cache.groups],
    )
