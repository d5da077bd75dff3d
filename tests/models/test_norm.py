"""RMSNorm against its formula and against transformers' Llama norm."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from flexdecode.models.norm import RMSNorm

ROUNDOFF = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("dtype", ROUNDOFF)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 64), (3, 4, 33), (1, 1)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_formula(dtype: torch.dtype, weight_dtype: torch.dtype, shape: tuple[int, ...], size: float) -> None:
    """fp16 squares overflow from 256 on, and 3e4 squared is the size of an outlier channel: fp32 all the way."""
    g = torch.Generator().manual_seed(0)
    x = (torch.rand(shape, generator=g) * 2 * size - size).to(dtype)
    weight = torch.randn(shape[-1], generator=g).to(weight_dtype)
    got = RMSNorm(weight, 1e-6)(x)
    assert got.dtype == dtype
    wanted = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert bool(((got.double() - wanted).abs() <= 1.01 * ROUNDOFF[dtype] * wanted.abs() + 1e-7).all())


def test_weights_are_fp32() -> None:
    """Gemma's 1 + w in bf16 would lose most of w."""
    weight = torch.tensor([1 + 2.0**-12])
    assert RMSNorm(weight, 0.0)(torch.ones(1)).item() == pytest.approx(1 + 2.0**-12, abs=1e-7)
    assert RMSNorm(weight.bfloat16(), 0.0).weight.dtype == torch.float32


def test_zeros_stay_zero() -> None:
    assert torch.equal(RMSNorm(torch.ones(8), 1e-6)(torch.zeros(2, 8)), torch.zeros(2, 8))


def test_transformers_agrees() -> None:
    theirs, x = LlamaRMSNorm(48, eps=1e-5), torch.randn(7, 48, generator=torch.Generator().manual_seed(1))
    theirs.weight.data = torch.randn(48, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(RMSNorm(theirs.weight.data, 1e-5)(x), theirs(x).detach(), atol=1e-6, rtol=1e-6)
