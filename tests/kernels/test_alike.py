"""Rows that are to be alike: each has the same bits alone, in any company, and in any place of it, on every instruction
set; and they are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode.kernels import ops
from flexdecode.kernels.linear import linear_dense, linear_int4, linear_int8, pack_int4, pack_int8
from tests.grids import by_name, pairwise
from tests.kernels.integers import ROUNDOFF, activations, exact, int4
from tests.kernels.test_attend_few import BLOCK, Packing, check, run

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 17, 40)

Product = Callable[[Tensor], Tensor]


def product(kind: str, n: int, group: int, groups: int, dtype: torch.dtype) -> tuple[Product, Tensor]:
    """x -> x @ w.T with rows alike, results in fp32; and w in fp64."""
    k = group * groups
    if kind == "int4":
        w = int4(n, k, group, fractional=groups % 2 == 1)
        tiles = pack_int4(*w.canonical)
        return lambda x: linear_int4(x, tiles, out=torch.float32, alike=True), w.weight_NK
    g = torch.Generator().manual_seed(n + k)
    if kind == "int8":
        codes, scales = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8), torch.rand(n, generator=g)
        packed = pack_int8(codes, scales)
        return lambda x: linear_int8(x, packed, out=torch.float32, alike=True), codes.double() * scales.double()[
            :, None
        ]
    dense = (torch.randn(n, k, generator=g) / 8).to(dtype)
    return lambda x: linear_dense(x, dense, out=torch.float32, alike=True), dense.double()


PRODUCTS = pairwise(
    kind=("int4", "int8", "dense"), n=(1, 8, 70, 256), group=(8, 32, 40, 128), groups=(1, 2, 3, 9), dtype=DTYPES
)


@pytest.mark.parametrize("case", PRODUCTS, ids=by_name)
def test_rows_of_products(isa: str, case: dict[str, Any]) -> None:
    multiply, weight_NK = product(**case)
    k = weight_NK.shape[1]
    x = activations(300, k, case["dtype"])
    whole = multiply(x)
    for count in COUNTS:
        for first in (0, 13):
            assert torch.equal(multiply(x[first : first + count]), whole[first : first + count])
    # Sums in fp32, an offset's share apart from the codes'.
    limit = (k + 8) * ROUNDOFF[torch.float32] * exact(x.abs(), weight_NK.abs() + weight_NK.abs().amax())
    assert bool(((whole.double() - exact(x, weight_NK)).abs() <= 4 * limit + 1e-30).all())


def test_rows_that_need_not_be_alike_are_quicker_otherwise() -> None:
    """Else there would be no need for two ways: one row takes four sums where it may."""
    if ops.use_isa() == "portable":
        pytest.skip("four lanes and four sums may come out alike")
    tiles = pack_int4(*int4(64, 256, 128).canonical)
    x = activations(300, 256, torch.float32)
    freely = linear_int4(x[:1], tiles), linear_int4(x, tiles)[:1]
    assert not torch.equal(*freely)


def seen_by(kind: str, rows: int, length: int) -> Tensor:
    """[rows, length], what the last `rows` positions see."""
    q, k = torch.arange(length - rows, length)[:, None], torch.arange(length)[None]
    causal = k <= q
    if kind == "window":
        return causal & (q - k < 100)
    if kind == "dilated":
        return causal & ((q - k) % 3 == 0)
    if kind == "late":  # each begins in a later block, so that alone it has fewer of them
        return causal & (k >= 131 * (q - length + rows) % length)
    if kind == "documents":
        return causal & (q // 7 == k // 7)
    return causal


def sequence(
    kind: str, rows: int, length: int, dim: int, heads: tuple[int, int], dtype: torch.dtype, kv: torch.dtype
) -> Any:
    """A sequence in shuffled pages, its last `rows` positions as queries."""
    g = torch.Generator().manual_seed(length + dim)
    (h, c), pages = heads, torch.randperm(-(-length // BLOCK) + 1, generator=g)[: -(-length // BLOCK)]
    stored: dict[str, Any] = {"k_scale": None, "v_scale": None}
    for name in ("k", "v"):
        x = torch.randn(c, (len(pages) + 1) * BLOCK, dim, generator=g)
        if kv == torch.int8:
            scale = x.abs().amax(-1) / 127
            stored |= {name: (x / scale[..., None]).round().to(torch.int8), f"{name}_scale": scale}
        else:
            stored[name] = x.to(kv)
    slots = (pages[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
    q = torch.randn(rows, h, dim, generator=g).to(dtype)
    seen = seen_by(kind, rows, length)
    return {"q": q, **stored, "page": BLOCK, "pages": pages, "slots": slots, "seen": seen}


def some(c: dict[str, Any], first: int, count: int) -> dict[str, Any]:
    """`count` of its queries, in a cache that ends with the last of them."""
    rows, length = c["seen"].shape
    end = length - rows + first + count
    seen = c["seen"][first : first + count, :end]
    packed = Packing()
    packed.add(0, seen, c["pages"])
    tiles = packed.tiles(c["q"].shape[1])
    return c | {"q": c["q"][first : first + count], "packed": tiles, "visible": [(c["slots"][:end], seen)]}


ATTENTION = pairwise(
    kind=("causal", "window", "dilated", "documents", "late"),
    length=(16, 64, 65, 100, 1029, 2100),
    dim=(31, 64, 80, 128, 256),
    heads=((1, 1), (3, 1), (4, 1), (8, 1), (14, 2)),
    types=((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.bfloat16, torch.int8)),
    poisoned=(False, True),
)


@pytest.mark.parametrize("case", ATTENTION, ids=by_name)
def test_queries_of_attention(isa: str, case: dict[str, Any]) -> None:
    """Sixteen queries together, and each part of them as if the others had not yet come. A poisoned key is seen by
    nobody but the queries from the tenth on, if at all."""
    dtype, kv = case["types"]
    c = sequence(case["kind"], 16, case["length"], case["dim"], case["heads"], dtype, kv)
    if case["poisoned"] and kv != torch.int8:
        c["v"][:, c["slots"][case["length"] - 6]] = float("nan")
    options: dict[str, Any] = {"alike": True, "sinks_H": torch.linspace(-2, 2, case["heads"][0])}
    whole = some(c, 0, 16)
    out, lse = run(whole, **options)
    if not case["poisoned"]:
        check(whole, **options)
    for first, count in ((0, 1), (3, 1), (15, 1), (0, 2), (7, 3), (2, 4), (5, 9), (0, 15)):
        part, part_lse = run(some(c, first, count), **options)
        torch.testing.assert_close(part, out[first : first + count], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(part_lse, lse[first : first + count], rtol=0, atol=0, equal_nan=True)
    assert bool(out[:10].isfinite().all())


def test_known_scores_are_alike(isa: str) -> None:
    steps = [ops.ScoreStep("softcap", 2.0), ops.ScoreStep("alibi", table=torch.tensor([0.5, 0.25, 0.1, 0.01]))]
    c = sequence("causal", 16, 300, 64, (4, 2), torch.bfloat16, torch.bfloat16)
    out, _ = run(some(c, 0, 16), alike=True, steps=steps)
    for first in (0, 4, 15):
        assert torch.equal(run(some(c, first, 1), alike=True, steps=steps)[0], out[first : first + 1])
