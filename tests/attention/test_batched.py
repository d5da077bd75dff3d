"""Batches in torch's layout, whatever their strides, as slots that kernels read; one plan for all layers of a step."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from flexdecode.attention import batched
from flexdecode.attention.flex_attention import flex_attention as typed
from flexdecode.config import FlexdecodeWarning

flex_attention: Any = typed


def qkv(length: int = 70) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 16, generator=dice) for heads, n in ((4, 5), (2, length), (2, length)))
    return q, k, v


Q, K, V = qkv()


@pytest.mark.parametrize("layout", ["as it is", "transposed", "fused", "a cache's", "dim in the middle", "odd"])
@pytest.mark.parametrize("which", ["both", "keys"])
@pytest.mark.parametrize("length", [1, 70])
def test_any_layout(layout: str, which: str, length: int) -> None:
    """Keys and values are read where they lie, if dims are together; what lies beside them is never read."""

    def laid(x: Tensor) -> Tensor:
        batch, heads, length, dim = x.shape
        if layout == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "fused":
            room = torch.full((batch, length, 3, heads, dim), math.nan)
            room[:, :, 1] = x.transpose(1, 2)
            return room[:, :, 1].transpose(1, 2)
        if layout == "a cache's":
            room = torch.full((batch + 1, heads, 2 * length, dim), math.nan)
            room[1:, :, :length] = x
            return room[1:, :, :length]
        if layout == "dim in the middle":
            return x.transpose(2, 3).contiguous().transpose(2, 3)
        if layout == "odd":
            room = torch.full((batch * (heads * length * dim + 1),), math.nan)
            return room.as_strided(x.shape, (heads * length * dim + 1, length * dim, dim, 1)).copy_(x)
        return x

    q, k, v = qkv(length)
    wanted = flex_attention(q, k, v, enable_gqa=True)
    k = laid(k)
    v = laid(v) if which == "both" else v
    assert torch.equal(flex_attention(laid(q), k, v, enable_gqa=True), wanted)
    if which == "both" and layout in ("as it is", "transposed", "fused", "a cache's"):
        kv, step = batched.in_slots(k, v)
        assert kv.k_CSD.data_ptr() == k.data_ptr()
        assert kv.v_CSD.data_ptr() == v.data_ptr()
        assert torch.equal(kv.k_CSD[:, step : step + length], k[1])


def test_without_kernels_it_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    batched._warn_once.cache_clear()
    monkeypatch.setattr(batched, "missing_kernels", lambda _: "no C++ compiler was found")
    with pytest.warns(FlexdecodeWarning, match="no C\\+\\+ compiler was found"):
        flex_attention(Q, K, V, enable_gqa=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flex_attention(Q, K, V, enable_gqa=True)


def test_one_plan_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask is planned once, and anew when what it captured has changed in place."""
    planned = []
    real = batched.plan_batch
    monkeypatch.setattr(batched, "plan_batch", lambda *args: planned.append(args) or real(*args))  # type: ignore[func-returns-value]
    position = torch.tensor(3)
    mask = create_block_mask(lambda b, h, q, k: k <= q + position, None, None, 5, 70, "cpu", BLOCK_SIZE=128)
    first = [flex_attention(Q, K, V, None, mask, enable_gqa=True) for _ in range(3)]
    assert len(planned) == 1
    position.add_(40)
    after = flex_attention(Q, K, V, None, mask, enable_gqa=True)
    assert len(planned) == 2
    assert torch.equal(first[0], first[2])
    seen = torch.arange(70) <= torch.arange(5)[:, None] + 43
    wanted = torch.nn.functional.scaled_dot_product_attention(Q, K, V, attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close(after, wanted, atol=1e-5, rtol=1e-5)
    mask.kv_num_blocks.zero_()
    assert not flex_attention(Q, K, V, None, mask, enable_gqa=True).any()
