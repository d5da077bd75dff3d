"""Kernels alone: each against its reference first, then against what the memory gives in the same run.

Decode attention of one sequence: every key and value must be read once, so the ceiling is their bytes at the read rate
of the same threads. The sdpa beside it is our folded use of it, not torch's own grouped path, which is slower still.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flexdecode.attention.attend import Backend, attend
from flexdecode.attention.backends.cpu import Cpu
from flexdecode.attention.backends.reference import Reference
from flexdecode.attention.backends.sdpa import Sdpa
from flexdecode.attention.cache import CacheLayer, KVCache, bytes_per_token
from flexdecode.attention.masks import Mask, causal
from flexdecode.attention.plan import plan_attention
from flexdecode.benchmark.bandwidth import Reader, interleaved, ratio
from flexdecode.kernels import ops

_PAGE = 64


@dataclass(frozen=True)
class DecodeCase:
    """One layer's attention of `queries` new tokens of one sequence."""

    keys: int
    head_dim: int
    group: int
    kv_heads: int = 8
    kv_dtype: torch.dtype = torch.bfloat16
    queries: int = 1
    mask: Mask = field(default_factory=causal)

    @property
    def name(self) -> str:
        kind = str(self.kv_dtype).removeprefix("torch.")
        return f"decode {self.keys} keys, {self.kv_heads} kv heads of {self.head_dim}, group {self.group}, {kind}"


def decode_cases(lengths: Sequence[int], head_dims: Sequence[int], groups: Sequence[int]) -> list[DecodeCase]:
    """Every length at head_dim 128 and a group of 4; every head_dim and group at the longest; int8 there too."""
    longest = max(lengths)
    cases = [DecodeCase(n, 128, 4) for n in lengths]
    cases += [DecodeCase(longest, dim, 4) for dim in head_dims if dim != 128]
    cases += [DecodeCase(longest, 128, group) for group in groups if group != 4]
    cases.append(DecodeCase(longest, 128, 4, kv_dtype=torch.int8))
    return cases


def bench_decode(
    cases: Sequence[DecodeCase], repetitions: int, beside: Sequence[Backend] = (Sdpa(),)
) -> Iterator[dict[str, Any]]:
    """A row a case: the error against the reference, the time, GB/s, the fraction of the read rate, and how many times
    quicker than the backends named in `beside`. Raises ValueError for a kernel that misses its tolerance."""
    for case in cases:
        setting = _setting(case)
        error = _error(case, setting)
        reader = Reader(case.keys * bytes_per_token(setting.cache.layers[0], case.kv_dtype))
        ours, read = interleaved(repetitions, setting.call(Cpu()), reader)
        row = {
            "benchmark": "kernels",
            "kernel": case.name,
            "isa": ops.use_isa(),
            "threads": torch.get_num_threads(),
            "repetitions": repetitions,
            "error": error,
            "ms": median(ours) * 1e3,
            "ms_min": min(ours) * 1e3,
            "ms_max": max(ours) * 1e3,
            "gb_per_s": reader.nbytes / median(ours) / 1e9,
            "read_gb_per_s": reader.nbytes / median(read) / 1e9,
            "fraction_of_read": ratio(read, ours),
            "torch": torch.__version__,
        }
        for backend in beside:
            (theirs,) = interleaved(3, setting.call(backend))
            row[f"times_{backend.name}"] = median(theirs) / median(ours)
        yield row


@dataclass(frozen=True)
class _Setting:
    cache: KVCache
    sequence: int
    q_THD: Tensor
    mask: Mask

    def call(self, backend: Backend) -> Callable[[], Tensor]:
        plan = plan_attention(self.cache, [self.sequence], [len(self.q_THD)], self.mask)

        def run() -> Tensor:
            out = attend(self.q_THD, self.cache, 0, plan, backend=backend)
            assert isinstance(out, Tensor)
            return out

        return run


def _setting(case: DecodeCase) -> _Setting:
    layer = CacheLayer(case.kv_heads, case.head_dim, case.mask)
    cache = KVCache([layer], case.keys, page=_PAGE, dtype=case.kv_dtype)
    sequence = cache.new()
    generator = torch.Generator().manual_seed(0)
    slab = 4096
    for start in range(0, case.keys, slab):
        count = min(slab, case.keys - start)
        k, v = (torch.randn(count, case.kv_heads, case.head_dim, generator=generator) for _ in range(2))
        cache.write(0, cache.append([sequence], [count]), k, v)
    heads = case.kv_heads * case.group
    q_THD = torch.randn(case.queries, heads, case.head_dim, generator=generator).bfloat16()
    return _Setting(cache, sequence, q_THD, case.mask)


def _error(case: DecodeCase, setting: _Setting) -> float:
    """Largest difference to the fp32 reference over the reference's largest value."""
    ours, exact = setting.call(Cpu())().float(), setting.call(Reference())().float()
    error = float((ours - exact).abs().max() / exact.abs().max())
    if not error < 2e-2:
        raise ValueError(f"{case.name}: the kernel is off by {error:.3g} of the largest value, allowed is 0.02")
    return error
