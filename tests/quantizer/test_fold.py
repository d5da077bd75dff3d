"""Scales moved into a norm: exact for what the file's dtype can hold, and given up for what it cannot."""

from __future__ import annotations

import pytest
import torch

from flexdecode.models.linear import DenseLinear
from flexdecode.quantizer.fold import into_linear, into_norm
from flexdecode.quantizer.groups import Group


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_times_columns_is_what_it_was(dtype: torch.dtype, offset: float) -> None:
    """To fp32's rounding, although the norm is rounded to the dtype; and the stored weight is one the dtype holds."""
    generator = torch.Generator().manual_seed(0)
    stored = (torch.randn(500, generator=generator) * 0.3 + (1 - offset)).to(dtype).float()
    old = stored + offset
    scale = torch.exp2(torch.randn(500, generator=generator) * 2)
    new, exact = into_norm(old, scale, offset, dtype)
    assert torch.allclose(new * exact, old, rtol=1e-6)
    assert torch.equal((new - offset).to(dtype).float() + offset, new)
    assert bool(((exact == 1) | ((exact / scale - 1).abs() < 1)).all())
    assert float((exact != 1).float().mean()) > 0.8


def test_channels_that_cannot_be_divided_are_left() -> None:
    """A norm weight of 0; one that Gemma's 1 + w cannot tell from 0 once it is divided; and one beyond the dtype."""
    old = torch.tensor([0.0, 1.0, 1.0, 0.5])
    scale = torch.tensor([4.0, 4000.0, 1e-7, 2.0])
    new, exact = into_norm(old, scale, 1.0, torch.bfloat16)
    assert new[:2].tolist() == [0.0, 1.0]
    assert exact[:2].tolist() == [1.0, 1.0]
    assert (new[3], exact[3]) == (0.25, 2.0)
    assert bool(torch.isfinite(new).all() and (exact > 0).all())
    new, exact = into_norm(torch.ones(1), torch.tensor([1e-9]), 0.0, torch.float16)
    assert (new.item(), exact.item()) == (1.0, 1.0)


def test_values_of_grouped_heads() -> None:
    """The last rows are divided, each by the scale of all the channels that it becomes; so is the bias."""
    weight, bias = torch.ones(10, 3), torch.ones(10)
    linear = DenseLinear(weight.clone(), bias.clone())
    scale = torch.tensor([2.0, 4.0]).repeat(2)  # two query heads of 2 for one kv head
    into_linear(linear, Group(("out",), linear="qkv", repeat=2, head_dim=2), scale, torch.float32)
    assert torch.equal(linear.weight_NK[:8], weight[:8])
    assert linear.weight_NK[8:, 0].tolist() == [0.5, 0.25]
    assert linear.bias is not None
    assert linear.bias.tolist() == [1.0] * 8 + [0.5, 0.25]
