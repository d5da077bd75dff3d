"""The CPU attention kernel on every instruction set that this machine runs, against the formula in fp64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode.kernels import ops
from tests.grids import by_name, pairwise

BLOCK = 64
CAP = ops.ScoreStep("softcap", 1.5)


@dataclass
class Packing:
    """Builds a PackedTiles, one tile a sequence, from what each row sees."""

    rows: list[list[int]] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    bits_at: list[int] = field(default_factory=list)
    bits: list[int] = field(default_factory=list)
    q_idx: list[int] = field(default_factory=list)

    def add(self, row: int, seen: Tensor, pages: Tensor) -> None:
        count, length = seen.shape
        at = (len(self.blocks), len(self.bits), len(self.q_idx))
        partial = 0
        for block in range(-(-length // BLOCK)):
            part = seen[:, block * BLOCK : (block + 1) * BLOCK]
            if not part.any():
                continue
            self.blocks.append(block)
            self.bits_at.append(-1 if part.all() else partial)
            if not part.all():
                partial += 1
                self.bits += [sum(1 << i for i, x in enumerate(r) if x) for r in part.tolist()]
        self.rows.append(
            [row, count, length, -1, 0, len(self.table), len(self.blocks) - at[0], at[0], at[1], count, at[2]]
        )
        self.table += pages.tolist()
        self.q_idx += range(length - count, length)

    def tiles(self, heads: int) -> ops.PackedTiles:
        kept = [heads * r[1] * r[6] * BLOCK for r in self.rows]
        rows = [[*r, sum(kept[:i])] for i, r in enumerate(self.rows)]
        table, blocks, bits_at = (torch.tensor(x, dtype=torch.int32) for x in (self.table, self.blocks, self.bits_at))
        bits = torch.tensor([x - (1 << 64) if x >> 63 else x for x in self.bits], dtype=torch.long)
        q_idx = torch.tensor(self.q_idx, dtype=torch.long)
        return ops.PackedTiles(torch.tensor(rows).view(-1, 12), table, blocks, bits_at, bits, q_idx, sum(kept))


def case(
    lengths: list[int],
    rows: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    v_dim: int | None = None,
    page: int = 64,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    starts: list[int] | None = None,
    holes: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Sequences in shuffled pages of a pool full of NaN, and which keys each row sees."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // page) for n in lengths]
    pages = torch.randperm(sum(counts) + 2, generator=generator)
    kv_dtype = kv_dtype or dtype
    k, v = (torch.full((kv_heads, len(pages) * page, d), float("nan")) for d in (dim, dim if v_dim is None else v_dim))
    starts = starts or [0] * len(lengths)
    packed, visible, row = Packing(), [], 0
    at = 0
    for n, r, start, count in zip(lengths, rows, starts, counts, strict=True):
        own = pages[at : at + count]
        slots = (own[:, None] * page + torch.arange(page)).flatten()[:n]
        for x in (k, v):
            x[:, slots] = torch.randn(kv_heads, n, x.shape[2], generator=generator)
        seen = torch.rand(r, n, generator=generator) >= holes
        seen[:, :start] = False
        packed.add(row, seen, own)
        visible.append((slots, seen))
        at, row = at + count, row + r
    q = torch.randn(row, heads, dim, generator=generator).to(dtype)
    stored = {"k": k, "v": v, "k_scale": None, "v_scale": None}
    if kv_dtype == torch.int8:
        for name in ("k", "v"):
            x = stored[name].nan_to_num(0.0)
            scale = x.abs().amax(-1) / 127
            stored[name] = (x / scale.clamp(min=1e-9)[..., None]).round().to(torch.int8)
            stored[f"{name}_scale"] = scale
    else:
        stored |= {"k": k.to(kv_dtype), "v": v.to(kv_dtype)}
    return {
        "q": q,
        **stored,
        "packed": packed.tiles(heads),
        "page": page,
        "visible": visible,
    }


def run(c: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    scale = c["q"].shape[2] ** -0.5
    names = ("q", "k", "v", "k_scale", "v_scale", "packed")
    out, lse = ops.attend_few(*(c[x] for x in names), page=c["page"], scale=scale, return_lse=True, **options)
    assert lse is not None
    return out, lse


def formula(c: dict[str, Any], softcap: float = 0.0, sinks_H: Tensor | None = None) -> tuple[Tensor, Tensor]:
    q, group = c["q"].double(), c["q"].shape[1] // c["k"].shape[0]
    k, v = (
        c[x].double() if c[f"{x}_scale"] is None else c[x].double() * c[f"{x}_scale"].double()[..., None]
        for x in ("k", "v")
    )
    outs, lses, row = [], [], 0
    for slots, seen in c["visible"]:
        keys, values = (x[:, slots].repeat_interleave(group, 0) for x in (k, v))
        s = torch.einsum("qhd,hld->hql", q[row : row + len(seen)], keys) * q.shape[2] ** -0.5
        s = torch.tanh(s / softcap) * softcap if softcap else s
        s = s.masked_fill(~seen, float("-inf"))
        lse = torch.logsumexp(s, -1)
        if sinks_H is not None:
            lse = torch.logaddexp(lse, sinks_H.double()[:, None])
        p = torch.exp(s - torch.where(lse.isinf(), 0.0, lse)[..., None])
        outs.append(torch.einsum("hql,hld->qhd", p, values))
        lses.append(lse.T)
        row += len(seen)
    return torch.cat(outs), torch.cat(lses)


def check(c: dict[str, Any], **options: Any) -> None:
    out, lse = run(c, **options)
    softcap = sum(step.a for step in options.get("steps", ()))
    wanted, wanted_lse = formula(c, softcap, options.get("sinks_H"))
    assert torch.isfinite(out).all()
    # fp32 sums of a few hundred terms; in 16 bits one rounding of the result and, for bf16, of each weight. Beside int8
    # keys, bf16 queries and weights become 8 bits, too.
    rough = c["q"].dtype == torch.bfloat16 and c["k"].dtype == torch.int8
    limit = 4e-2 if rough else {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[c["q"].dtype]
    assert (out - wanted).abs().max() <= limit * max(1.0, wanted.abs().max().item())
    assert torch.equal(lse.isinf(), wanted_lse.isinf())
    finite = ~wanted_lse.isinf()
    torch.testing.assert_close(lse[finite].double(), wanted_lse[finite], atol=4e-2 if rough else 1e-4, rtol=1e-6)


GRID = pairwise(
    length=(1, 2, 63, 64, 65, 127, 130, 257, 700),
    rows=(1, 2, 5, 16),
    dim=(31, 64, 72, 80, 96, 128, 256),
    heads=((1, 1), (3, 1), (8, 2), (7, 1), (24, 2)),
    dtype=(torch.float32, torch.bfloat16, torch.float16),
    page=(1, 3, 16, 64, 128),
    holes=(0.0, 0.3, 0.97),
    v_dim=(None, 24, 160),
    split=(0, 1, 3),
)


@pytest.mark.parametrize("options", GRID, ids=by_name)
def test_grid(isa: str, options: dict[str, Any]) -> None:
    heads, kv_heads = options["heads"]
    n, rows = options["length"], min(options["rows"], options["length"])
    shape = {x: options[x] for x in ("dim", "dtype", "page", "holes", "v_dim")}
    check(case([n], [rows], heads=heads, kv_heads=kv_heads, **shape), split=options["split"])


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_and_keys_of_different_types(isa: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check(case([200, 65], [3, 1], dtype=dtype, kv_dtype=kv_dtype, holes=0.2))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_ragged_batches_over_any_number_of_threads(isa: str, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        check(case([1, 500, 64, 129, 3], [1, 16, 2, 1, 3], heads=6, kv_heads=2, starts=[0, 130, 0, 128, 1]))
    finally:
        torch.set_num_threads(before)


def test_sinks_softcap_and_rows_that_see_nothing(isa: str) -> None:
    sinks = torch.tensor([-3.0, 0.0, 5.0, 60.0])
    for holes in (0.0, 0.5, 1.0):
        c = case([150], [4], holes=holes)
        check(c, sinks_H=sinks)
        check(c, steps=[CAP], sinks_H=sinks)
    out, lse = run(case([150], [4], holes=1.0))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, float("-inf")))
    _, lse = run(case([150], [4], holes=1.0), sinks_H=sinks)
    assert torch.equal(lse, sinks.expand_as(lse))


def test_scores_of_any_size(isa: str) -> None:
    """Thousands above, thousands below, and equal: no overflow, no empty sum."""
    for factor in (0.0, 1e-3, 300.0):
        c = case([300], [2])
        c["q"] = c["q"] * factor
        check(c)
        check(c, steps=[replace(CAP, a=50.0)])


@pytest.mark.parametrize("split", [0, 2])
def test_the_same_bits_in_any_company_on_any_number_of_threads(isa: str, split: int) -> None:
    beside = case([90, 700, 1000], [1, 2, 5])
    own = beside["packed"].tiles[1:2].clone()
    own[0, 0] = 0
    alone = beside | {"q": beside["q"][1:3], "packed": replace(beside["packed"], tiles=own)}
    wanted = run(alone, split=split)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for got, want in zip(run(beside, split=split), wanted, strict=True):
                assert torch.equal(got[1:3], want)
    finally:
        torch.set_num_threads(before)


def test_masked_values_may_be_anything(isa: str) -> None:
    """0 · NaN is NaN: what a row does not see must not be multiplied for it."""
    for dtype in (torch.float32, torch.bfloat16):
        c = case([200], [4], holes=0.4, dtype=dtype)
        slots, seen = c["visible"][0]
        hidden = slots[~seen[0]]
        clean = run(c)[0][0]
        for x in ("k", "v"):
            c[x][:, hidden] = float("nan")
        assert torch.equal(run(c)[0][0], clean)


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(RuntimeError, match="avx9000"):
        ops.use_isa("avx9000")


def test_reasons() -> None:
    assert ops.attend_unsupported("cpu", torch.float32, torch.int8) is None
    assert "cuda" in str(ops.attend_unsupported("cuda", torch.float32, torch.float32))
    assert "float64" in str(ops.attend_unsupported("cpu", torch.float64, torch.float32))
