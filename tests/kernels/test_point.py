"""The small operators by our kernels, on every instruction set, against the same in torch."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from flexdecode.attention.cache import CacheLayer, KVCache
from flexdecode.attention.masks import causal
from flexdecode.kernels import point
from flexdecode.kernels.point import Activation, finish_heads, gated, rms_norm
from flexdecode.models.norm import RMSNorm
from flexdecode.models.rope import rotate
from tests.grids import by_name, pairwise

ULP = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize("width", [1, 3, 16, 31, 64, 200, 577])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_gated(isa: str, activation: Activation, width: int, dtype: torch.dtype) -> None:
    x = (random(5, 2 * width, dtype=torch.float32) * 6).to(dtype)
    got = gated(x, activation)
    wanted = gated(x.double(), activation)  # fp64 goes through torch
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, rtol=ULP[dtype], atol=3e-6)


@pytest.mark.parametrize("dtype", ULP)
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 5, 64), (70, 576)])
def test_rms_norm(isa: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], seed=1)
    wanted = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), wanted, rtol=ULP[dtype], atol=1e-6)


def test_nan_stays_nan(isa: str) -> None:
    """A row that is not finite must not come out as numbers."""
    x = random(2, 40)
    x[1, 7] = float("nan")
    for got in (rms_norm(x, torch.ones(40), 1e-6), gated(x, "silu"), gated(x, "gelu_tanh")):
        assert not got[1].isfinite().all()
        assert got[0].isfinite().all()


HEADS = pairwise(
    dtype=tuple(ULP),
    kv_dtype=(torch.float32, torch.bfloat16, torch.float16, torch.int8),
    heads=((1, 1), (6, 2), (5, 5)),
    head_dim=(8, 20, 64, 100),
    half=(0, 2, 4),
    norm=("none", "head", "all"),
    tokens=(1, 3, 40),
)


@pytest.mark.parametrize("case", HEADS, ids=by_name)
def test_finish_heads(isa: str, case: dict[str, Any]) -> None:
    """Norm, rotation and cache against the model's own modules, to the last bit but for sums in another order."""
    (heads, kv_heads), d, tokens = case["heads"], case["head_dim"], case["tokens"]
    qkv = random(tokens, heads + 2 * kv_heads, d, dtype=case["dtype"])
    layer = CacheLayer(kv_heads, d, causal())
    ours, theirs = (KVCache([layer], 200, page=16, dtype=case["kv_dtype"]) for _ in range(2))
    slots, _ = (cache.append([cache.new()], [tokens]) for cache in (ours, theirs))
    kv = ours.kv(0)
    for data in (kv.k_CSD, kv.v_CSD):
        data.zero_()
    q, k, v = (x.clone() for x in qkv.split([heads, kv_heads, kv_heads], dim=1))
    norms = None
    if case["norm"] != "none":
        whole = case["norm"] == "all"
        weights = random(heads * d if whole else d, seed=2), random(kv_heads * d if whole else d, seed=3)
        norms = (*weights, 1e-6)
        q, k = (
            RMSNorm(w, 1e-6)(x.reshape(tokens, -1) if whole else x).view_as(x)
            for w, x in zip(weights, (q, k), strict=True)
        )
    tables = None
    if case["half"]:
        angles = random(tokens, 1, case["half"], seed=4)
        tables = angles.cos(), angles.sin()
        q, k = rotate(q, *tables), rotate(k, *tables)
    theirs.write(0, slots, k, v)
    where = (kv.k_CSD, kv.v_CSD, kv.k_scale_CS, kv.v_scale_CS)
    assert finish_heads(qkv, heads, kv_heads, norms, case["norm"] == "all", tables, where, slots.by_group[0])
    torch.testing.assert_close(qkv[:, :heads], q, rtol=2 * ULP[case["dtype"]], atol=1e-5)
    numbers = slots.by_group[0].numpy()
    for got, wanted in zip(
        ours.kv(0).read(numbers, torch.float32), theirs.kv(0).read(numbers, torch.float32), strict=True
    ):
        off = 2 * ULP[case["dtype"]] if case["kv_dtype"] == case["dtype"] else 2.0**-6
        torch.testing.assert_close(got, wanted, rtol=off, atol=5e-2 if case["kv_dtype"] == torch.int8 else 1e-5)
    untouched = torch.ones(kv.k_CSD.shape[1], dtype=torch.bool).index_fill_(0, slots.by_group[0], False)
    assert not kv.k_CSD[:, untouched].any()


def test_codes_are_those_of_the_cache(isa: str) -> None:
    """int8 keys are rounded as `KVCache.write` rounds them: halves to the even code, a row of zeros with scale 0."""
    qkv = random(6, 3, 40) * torch.logspace(-20, 20, 6, base=2.0)[:, None, None]
    qkv[3] = 0
    ours, theirs = (KVCache([CacheLayer(1, 40, causal())], 64, dtype=torch.int8) for _ in range(2))
    slots, _ = (cache.append([cache.new()], [6]) for cache in (ours, theirs))
    theirs.write(0, slots, qkv[:, 1:2], qkv[:, 2:])
    a, b = ours.kv(0), theirs.kv(0)
    finish_heads(qkv, 1, 1, None, False, None, (a.k_CSD, a.v_CSD, a.k_scale_CS, a.v_scale_CS), slots.by_group[0])
    at = slots.by_group[0]
    for got, wanted in ((a.k_CSD, b.k_CSD), (a.v_CSD, b.v_CSD)):
        assert torch.equal(got[:, at], wanted[:, at])
    for got, wanted in ((a.k_scale_CS, b.k_scale_CS), (a.v_scale_CS, b.v_scale_CS)):
        assert got is not None
        assert wanted is not None
        torch.testing.assert_close(got[:, at], wanted[:, at], rtol=1e-6, atol=0.0)


def test_without_kernels_torch_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(4, 64), random(64, seed=1)
    kernels = rms_norm(x, weight, 1e-6), gated(x, "gelu")
    monkeypatch.setattr(point, "attend_unsupported", lambda *_: "no C++ compiler was found")
    torch.testing.assert_close((rms_norm(x, weight, 1e-6), gated(x, "gelu")), kernels)
    empty = torch.empty(1, 1, 8)
    assert not finish_heads(
        x.view(4, 2, 32)[:, :, :8].contiguous(), 0, 1, None, False, None, (empty, empty, None, None), torch.arange(4)
    )
