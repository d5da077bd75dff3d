"""The CPU kernel for attention of many queries, on every instruction set that this machine runs, against fp64.

A case is one sequence in slots of a pool full of NaN, its queries cut into tiles, and which keys each (head, query)
sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode.kernels import ops
from flexdecode.kernels.ops import PackedTiles, ScoreStep
from tests.grids import by_name, pairwise

BLOCK = 64


@dataclass
class Packing:
    """Builds a PackedTiles from what each row of a tile sees."""

    rows: list[list[int]] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    bits_at: list[int] = field(default_factory=list)
    bits: list[Tensor] = field(default_factory=list)
    q_idx: list[int] = field(default_factory=list)
    words: int = 0

    def add(self, row: int, q_idx: list[int], seen_RL: Tensor, kv_head: int, base: int, table: int) -> None:
        """One tile; seen_RL has a row for each query, or for each (head of the group, query)."""
        rows, length = seen_RL.shape
        first, held = len(self.blocks), 0
        padded = torch.zeros(rows, -(-length // BLOCK) * BLOCK, dtype=torch.bool)
        padded[:, :length] = seen_RL
        words = (padded.view(rows, -1, BLOCK).long() << torch.arange(BLOCK)).sum(-1)
        for block in range(words.shape[1]):
            part = seen_RL[:, block * BLOCK : (block + 1) * BLOCK]
            if not part.any():
                continue
            self.blocks.append(block)
            self.bits_at.append(-1 if part.all() else held)
            if not part.all():
                held += 1
                self.bits.append(words[:, block])
        found = (len(self.blocks) - first, first, self.words, rows, len(self.q_idx), 0)
        self.rows.append([row, len(q_idx), length, kv_head, base, table, *found])
        self.words += held * rows
        self.q_idx += q_idx

    def tiles(self) -> PackedTiles:
        table, blocks, bits_at = (torch.tensor(x, dtype=torch.int32) for x in (self.table, self.blocks, self.bits_at))
        bits = torch.cat([torch.empty(0, dtype=torch.long), *self.bits])
        q_idx = torch.tensor(self.q_idx, dtype=torch.long)
        return PackedTiles(torch.tensor(self.rows).view(-1, 12), table, blocks, bits_at, bits, q_idx, 0)


@dataclass(frozen=True)
class Case:
    q: Tensor
    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    packed: PackedTiles
    page: int
    slots: Tensor  # of the sequence's keys
    q_idx: list[int]
    seen_HQL: Tensor


def seen_by(mask: str, heads: int, q_idx: list[int], length: int, generator: torch.Generator) -> Tensor:
    """What each (head, query) sees; heads differ only in "by head"."""
    q, k = torch.tensor(q_idx)[:, None], torch.arange(length)
    shape = (heads if mask == "by head" else 1, len(q_idx), length)
    seen = {
        "all": torch.ones(shape, dtype=torch.bool),
        "causal": (k <= q)[None],
        "window": ((k <= q) & (k > q - 70))[None],
        "holes": torch.rand(shape, generator=generator) > 0.4,
        "sparse": torch.rand(shape, generator=generator) > 0.99,
        "by head": (k <= q)[None] & (torch.rand(shape, generator=generator) > 0.3),
        "nothing": torch.zeros(shape, dtype=torch.bool),
    }[mask]
    return seen.expand(heads, -1, -1)


def case(
    length: int,
    rows: int,
    *,
    count: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    v_dim: int | None = None,
    page: int = 64,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    mask: str = "causal",
    seed: int = 0,
) -> Case:
    """The last `rows` queries of a sequence in shuffled pages (page 0: in one run), in tiles of `count`."""
    generator = torch.Generator().manual_seed(seed)
    group, kv_dtype = heads // kv_heads, kv_dtype or dtype
    pages = torch.randperm(-(-length // (page or length)) + 2, generator=generator)
    size = page or length + 3
    slots = (pages[:, None] * size + torch.arange(size)).flatten()[:length] if page else 2 + torch.arange(length)
    stored: list[tuple[Tensor, Tensor | None]] = []
    for d in (dim, v_dim or dim):
        x = torch.full((kv_heads, len(pages) * size, d), float("nan"))
        x[:, slots] = torch.randn(kv_heads, length, d, generator=generator)
        scale = x.nan_to_num(0.0).abs().amax(-1) / 127
        if kv_dtype == torch.int8:
            codes = (x.nan_to_num(0.0) / scale.clamp(min=1e-9)[..., None]).round().to(torch.int8)
            hidden = torch.ones(x.shape[1], dtype=torch.bool).index_fill(0, slots, False)
            stored.append((codes, scale.masked_fill(hidden, float("nan"))))
        else:
            stored.append((x.to(kv_dtype), None))
    (k, k_scale), (v, v_scale) = stored
    packing, q_idx = Packing(), list(range(length - rows, length))
    packing.table = pages.tolist() if page else []
    seen_HQL = seen_by(mask, heads, q_idx, length, generator)
    for first in range(0, rows, count):
        own = slice(first, min(rows, first + count))
        base, table = (0, 0) if page else (2, -1)
        if mask == "by head":
            for kv_head in range(kv_heads):
                seen = seen_HQL[kv_head * group : (kv_head + 1) * group, own].flatten(0, 1)
                packing.add(first, q_idx[own], seen, kv_head, base, table)
        else:
            packing.add(first, q_idx[own], seen_HQL[0, own], -1, base, table)
    q = torch.randn(rows, heads, dim, generator=generator).to(dtype)
    return Case(q, k, v, k_scale, v_scale, packing.tiles(), page or 1, slots, q_idx, seen_HQL)


def run(c: Case, steps: Sequence[ScoreStep] = (), sinks_H: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out, lse = ops.attend_many(
        c.q,
        c.k,
        c.v,
        c.k_scale,
        c.v_scale,
        c.packed,
        page=c.page,
        scale=c.q.shape[2] ** -0.5,
        steps=steps,
        sinks_H=sinks_H,
        return_lse=True,
    )
    assert lse is not None
    return out, lse


def stepped(s_HQL: Tensor, step: ScoreStep, q_Q: Tensor) -> Tensor:
    distance = q_Q[:, None] - torch.arange(s_HQL.shape[2])
    table = torch.zeros(1, 1) if step.table is None else step.table.double()
    if step.kind == "softcap":
        return torch.tanh(s_HQL / step.a) * step.a
    if step.kind == "scale":
        return s_HQL * step.a
    if step.kind == "alibi":
        return s_HQL - table[:, None, None] * distance
    if step.kind == "relative":
        return s_HQL + table[:, (distance - int(step.a)).clamp(0, table.shape[1] - 1)]
    return s_HQL * (1 + step.a * torch.log1p(((q_Q + 1) / step.b).floor().double()))[:, None]


def formula(c: Case, steps: Sequence[ScoreStep] = (), sinks_H: Tensor | None = None) -> tuple[Tensor, Tensor]:
    group = c.q.shape[1] // c.k.shape[0]
    keys, values = (
        (x.double() if scale is None else x.double() * scale.double()[..., None])[:, c.slots].repeat_interleave(
            group, 0
        )
        for x, scale in ((c.k, c.k_scale), (c.v, c.v_scale))
    )
    s = torch.einsum("qhd,hld->hql", c.q.double(), keys) * c.q.shape[2] ** -0.5
    for step in steps:
        s = stepped(s, step, torch.tensor(c.q_idx))
    s = s.masked_fill(~c.seen_HQL, float("-inf"))
    lse = torch.logsumexp(s, -1)
    if sinks_H is not None:
        lse = torch.logaddexp(lse, sinks_H.double()[:, None])
    p = torch.exp(s - torch.where(lse.isinf(), 0.0, lse)[..., None])
    # 0 · NaN is NaN here too, so what rows see that is no number is worked out apart.
    out = torch.einsum("hql,hld->qhd", p, values.nan_to_num(0.0))
    spoiled = torch.einsum("hql,hld->qhd", c.seen_HQL.double(), values.isnan().double()) > 0
    return out.masked_fill(spoiled, float("nan")), lse.T


def check(c: Case, steps: Sequence[ScoreStep] = (), sinks_H: Tensor | None = None, times: float = 1.0) -> None:
    """`times`: how much more than for scores of a few units rounding may do."""
    out, lse = run(c, steps, sinks_H)
    wanted, wanted_lse = formula(c, steps, sinks_H)
    # fp32 sums of a few hundred terms; in 16 bits one rounding of the result and, for bf16, of each weight.
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[c.q.dtype]
    limit *= times * max(1.0, wanted.nan_to_num(0.0).abs().max().item())
    torch.testing.assert_close(out.double(), wanted, atol=limit, rtol=0.0, equal_nan=True)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=1e-4, rtol=1e-6, equal_nan=True)


GRID = pairwise(
    length=(1, 63, 64, 65, 127, 130, 192, 257, 700),
    rows=(1, 2, 17, 64, 127, 700),
    count=(5, 64, 100, 128),
    dim=(31, 64, 72, 80, 128, 256),
    heads=((1, 1), (3, 1), (8, 2), (14, 2), (5, 1)),
    dtype=((torch.float32, None), (torch.bfloat16, None), (torch.float16, None), (torch.bfloat16, torch.int8)),
    page=(0, 1, 16, 64, 100),
    mask=("all", "causal", "window", "holes", "sparse", "by head"),
    v_dim=(None, 24, 160),
)


@pytest.mark.parametrize("options", GRID, ids=by_name)
def test_grid(isa: str, options: dict[str, Any]) -> None:
    heads, kv_heads = options["heads"]
    dtype, kv_dtype = options["dtype"]
    rows = min(options["rows"], options["length"])
    own = {"rows": rows, "heads": heads, "kv_heads": kv_heads, "dtype": dtype, "kv_dtype": kv_dtype}
    check(case(**(options | own)))


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_and_keys_of_different_types(isa: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    for mask in ("causal", "holes"):
        check(case(300, 90, dtype=dtype, kv_dtype=kv_dtype, mask=mask))


def test_groups_larger_than_a_pass_over_the_keys(isa: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(case(200, 128, heads=24, kv_heads=1, dtype=dtype))
        check(case(70, 33, heads=40, kv_heads=1, dtype=dtype, mask="by head", dim=32))


STEPS = {
    "softcap": [ScoreStep("softcap", 1.5)],
    "alibi": [ScoreStep("alibi", table=torch.tensor([0.5, 0.25, 0.01, -0.02]))],
    "relative": [ScoreStep("relative", a=-3.0, table=torch.randn(4, 40, generator=torch.Generator().manual_seed(1)))],
    "log_scale": [ScoreStep("log_scale", 0.1, 32.0)],
    "several": [ScoreStep("scale", -2.0), ScoreStep("softcap", 20.0), ScoreStep("log_scale", 0.3, 7.0)],
}


@pytest.mark.parametrize("name", STEPS)
def test_score_modifications(isa: str, name: str) -> None:
    for dtype, kv_dtype in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)):
        for mask in ("all", "causal", "by head"):
            c = case(300, 130, dtype=dtype, kv_dtype=kv_dtype, mask=mask)
            check(c, STEPS[name])
            moved = replace(c.packed, q_idx=c.packed.q_idx + 40)  # positions are the tile's own, not its rows'
            check(replace(c, packed=moved, q_idx=[q + 40 for q in c.q_idx]), STEPS[name])


def test_sinks_and_rows_that_see_nothing(isa: str) -> None:
    sinks = torch.tensor([-3.0, 0.0, 5.0, 60.0])
    for dtype in (torch.float32, torch.bfloat16):
        for mask in ("all", "sparse", "nothing"):
            check(case(150, 70, mask=mask, dtype=dtype), sinks_H=sinks)
            check(case(150, 70, mask=mask, dtype=dtype), STEPS["softcap"], sinks_H=sinks)
        out, lse = run(case(150, 70, mask="nothing", dtype=dtype))
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, float("-inf")))
        _, lse = run(case(150, 70, mask="nothing", dtype=dtype), sinks_H=sinks)
        assert torch.equal(lse, sinks.expand_as(lse))


def test_scores_of_any_size(isa: str) -> None:
    """Thousands above, thousands below, and equal: no overflow, no empty sum, and a maximum that moves."""
    for factor in (0.0, 1e-3, 300.0):
        c = case(300, 70)
        check(replace(c, q=c.q * factor), times=max(1.0, factor / 10))
        check(replace(c, q=c.q * factor), [ScoreStep("softcap", 50.0)], times=max(1.0, factor / 10))
    rising = case(700, 40, mask="all")
    rising.k[:, rising.slots] = torch.linspace(-1.0, 1.0, 700)[:, None].expand(-1, 64)
    check(replace(rising, q=torch.full_like(rising.q, 20.0)), times=20.0)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_masked_may_be_anything(isa: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """0 · NaN is NaN: a row must not multiply what it does not see; one that sees it must show it."""
    for bad in (math.nan, math.inf):
        c = case(300, 40, mask="holes", dtype=dtype, kv_dtype=kv_dtype)
        clean, _ = run(c)
        hidden = c.slots[~c.seen_HQL[0, 7]]
        columns = slice(3, 9)
        for x, scale in ((c.k, c.k_scale), (c.v, c.v_scale)):
            if scale is None:
                x[:, hidden, columns] = bad
            else:
                scale[:, hidden] = bad
        out, _ = run(c)
        assert torch.equal(out[7], clean[7])
        assert not out[8].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_is_no_number_reaches_those_who_see_it(isa: str, dtype: torch.dtype) -> None:
    for mask in ("all", "causal", "holes", "by head"):
        c = case(200, 100, mask=mask, dtype=dtype)
        c.v[1, c.slots[130], 5] = math.nan
        c.v[0, c.slots[:3], 60] = math.nan
        check(c)


def test_strides(isa: str) -> None:
    """Queries inside a fused projection, keys and values side by side and slots outside heads."""
    for dtype in (torch.float32, torch.bfloat16):
        c = case(300, 100, dtype=dtype)
        fused = torch.cat([c.q, torch.full_like(c.q, math.nan)], 2)[..., :64]
        both = torch.stack([c.k, c.v], 1).permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3)
        assert not both[:, 0].is_contiguous()
        apart = replace(c, q=fused, k=both[:, 0], v=both[:, 1])
        for got, want in zip(run(apart), run(c), strict=True):
            assert torch.equal(got, want)


def test_the_same_bits_whatever_else_is_in_the_call(isa: str) -> None:
    c = case(500, 300, dtype=torch.bfloat16)
    wanted, wanted_lse = run(c)
    for i, (row, count) in enumerate(c.packed.tiles[:, :2].tolist()):
        own = c.packed.tiles[i : i + 1].clone()
        own[0, 0] = 0
        out, lse = run(replace(c, q=c.q[row : row + count], packed=replace(c.packed, tiles=own)))
        assert torch.equal(out, wanted[row : row + count])
        assert torch.equal(lse, wanted_lse[row : row + count])
