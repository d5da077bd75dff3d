"""The gated feed-forward against its formulas, for every activation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from flexdecode.config import Activation
from flexdecode.kernels.ops import gated
from flexdecode.models.linear import linear
from flexdecode.models.mlp import Mlp
from flexdecode.quantization.weights import Int4Weight

CPU = torch.device("cpu")


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def clamped(gate: float, up: float) -> float:
    """gpt-oss: the gate is bounded above only, one is added to the other half."""
    g, u = min(gate, 7.0), max(-7.0, min(up, 7.0))
    return (u + 1) * g * sigmoid(1.702 * g)


FORMULAS: dict[str, Callable[[float, float], float]] = {
    "silu": lambda g, u: g * sigmoid(g) * u,
    "gelu": lambda g, u: g * 0.5 * (1 + math.erf(g / math.sqrt(2))) * u,
    "gelu_tanh": lambda g, u: g * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u,
    "relu": lambda g, u: max(g, 0.0) * u,
    "clamped_swiglu": clamped,
}


def test_every_activation_has_its_formula_here() -> None:
    assert set(FORMULAS) == set(get_args(Activation))


def gates() -> Tensor:
    """[4, 2·I]: the whole range, beyond every bound."""
    gate = torch.tensor([-20.0, -7.5, -1.0, -1e-3, 0.0, 0.5, 3.0, 6.9, 7.1, 20.0])
    up = torch.tensor([[-9.0], [-0.5], [2.0], [8.0]])
    return torch.cat([gate.expand(4, -1), up.expand(-1, len(gate))], dim=1)


@pytest.mark.parametrize("activation", FORMULAS)
def test_gated(activation: Activation) -> None:
    x = gates()
    half = x.shape[1] // 2
    pairs = [zip(row[:half], row[half:], strict=True) for row in x.tolist()]
    wanted = torch.tensor([[FORMULAS[activation](g, u) for g, u in row] for row in pairs])
    torch.testing.assert_close(gated(x, activation), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("activation", "name"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("relu", "relu")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_agrees(activation: Activation, name: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(gated(x, activation), ACT2FN[name](gate) * up)


@pytest.mark.parametrize(("alpha", "limit"), [(1.702, 7.0), (1.0, 2.0), (3.0, 0.5)])
def test_bounds_are_the_configs(alpha: float, limit: float) -> None:
    x = gates().double()
    gate, up = x.chunk(2, dim=-1)
    gate, up = torch.minimum(gate, torch.tensor(limit)), up.clip(-limit, limit)
    wanted = (up + 1) * gate / (1 + torch.exp(-alpha * gate))
    torch.testing.assert_close(gated(x.float(), "clamped_swiglu", alpha, limit).double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_whole(quantized: bool, activation: Activation) -> None:
    """gate and up are one product, whose first half is the gate."""
    g = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(n, k, generator=g) / 8 for n, k in ((96, 64), (96, 64), (64, 96)))
    x = torch.randn(5, 64, generator=g)
    parts: list[Tensor | Int4Weight] = [gate, up]
    if quantized:
        parts = [
            Int4Weight.from_codes(
                torch.randint(0, 16, (96, 64), generator=g),
                torch.rand(96, 2, generator=g) / 30,
                torch.full((96, 2), 7.5),
            )
            for _ in range(2)
        ]
        gate, up = (p.dequantize() for p in parts if isinstance(p, Int4Weight))
    mlp = Mlp(linear(parts, None, torch.float32, CPU), linear([down], None, torch.float32, CPU), activation)
    formula = FORMULAS[activation]
    hidden = torch.tensor(
        [
            [formula(a, b) for a, b in zip(p, q, strict=True)]
            for p, q in zip((x @ gate.T).tolist(), (x @ up.T).tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(mlp(x), hidden @ down.T, atol=1e-4, rtol=1e-4)
