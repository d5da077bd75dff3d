"""Mixture of experts against a loop over tokens, and that only chosen experts are read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flexdecode.config import MoeConfig
from flexdecode.kernels.ops import gated
from flexdecode.models.linear import Linear, linear
from flexdecode.models.moe import Moe

CPU = torch.device("cpu")
D, HIDDEN = 16, 24
CONFIG = MoeConfig(experts=6, experts_per_token=2, intermediate_size=HIDDEN)


class Counted(Linear):
    """A dense layer that writes down how many rows each call had."""

    def __init__(self, weight_NK: Tensor, bias: Tensor | None) -> None:
        super().__init__((weight_NK.shape[0], weight_NK.shape[1]), bias, 0, "counted")
        self.weight_NK, self.calls = weight_NK, list[int]()

    def forward(self, x_TK: Tensor, out: torch.dtype | None = None) -> Tensor:
        self.calls.append(len(x_TK))
        return x_TK @ self.weight_NK.T + (0 if self.bias is None else self.bias)


def build(config: MoeConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> Moe:
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g) / 4).to(dtype)

    router = linear(
        [random(config.experts, D) * 4], random(config.experts) * 4 if config.router_bias else None, dtype, CPU
    )
    experts: list[tuple[Linear, Linear]] = []
    for _ in range(config.experts):
        gate_up = Counted(random(2 * HIDDEN, D), random(2 * HIDDEN) if config.bias else None)
        experts.append((gate_up, Counted(random(D, HIDDEN), random(D) if config.bias else None)))
    return Moe(config, router, experts)


def calls(moe: Moe) -> list[list[int]]:
    return [layer.calls for layer in moe.gate_up if isinstance(layer, Counted)]


def looped(moe: Moe, x_TD: Tensor) -> Tensor:
    """Token by token, in fp64, with the choice made by sorting."""
    c = moe.config
    out = torch.zeros(len(x_TD), D, dtype=torch.float64)
    for t, x in enumerate(x_TD):
        logits = moe.router(x[None])[0].double()
        chosen = sorted(range(c.experts), key=lambda e: -float(logits[e]))[: c.experts_per_token]
        weights = logits[chosen].softmax(0) if c.select_first else logits.softmax(0)[chosen]
        if c.normalize and not c.select_first:
            weights = weights / weights.sum()
        for weight, e in zip(weights, chosen, strict=True):
            gate_up, down = moe.gate_up[e], moe.down[e]
            assert isinstance(gate_up, Counted)
            assert isinstance(down, Counted)
            h = gate_up.weight_NK.double() @ x.double() + (0 if gate_up.bias is None else gate_up.bias.double())
            h = gated(h[None], c.activation, c.swiglu_alpha, c.swiglu_limit)[0]
            out[t] += weight * (down.weight_NK.double() @ h + (0 if down.bias is None else down.bias.double()))
    return out


def tokens(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, D, generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize(("normalize", "select_first"), [(True, False), (False, False), (True, True), (False, True)])
@pytest.mark.parametrize("chosen", [1, 2, 6])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("count", [1, 2, 33])
def test_against_a_loop(normalize: bool, select_first: bool, chosen: int, with_bias: bool, count: int) -> None:
    config = replace(
        CONFIG,
        experts_per_token=chosen,
        normalize=normalize,
        select_first=select_first,
        bias=with_bias,
        router_bias=with_bias,
    )
    moe = build(config)
    torch.testing.assert_close(moe(tokens(count)).double(), looped(moe, tokens(count)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("alpha", [1.702, 1.0])
def test_the_experts_activation_is_the_configs(alpha: float) -> None:
    moe = build(replace(CONFIG, activation="clamped_swiglu", swiglu_alpha=alpha, swiglu_limit=0.5, bias=True))
    torch.testing.assert_close(moe(tokens(9)).double(), looped(moe, tokens(9)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision(dtype: torch.dtype) -> None:
    moe = build(CONFIG, dtype)
    got = moe(tokens(33, dtype))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), looped(moe, tokens(33, dtype)), atol=0.05, rtol=0.05)


def test_the_router_is_fp32_and_its_weights_add_up() -> None:
    for config in (CONFIG, replace(CONFIG, select_first=True)):
        weights, index = build(config, torch.bfloat16).route(tokens(20, torch.bfloat16))
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.sum(-1), torch.ones(20))
        assert weights.shape == index.shape == (20, 2)
        assert all(len({*row}) == 2 for row in index.tolist())
    weights, _ = build(replace(CONFIG, normalize=False), torch.bfloat16).route(tokens(20, torch.bfloat16))
    assert bool((weights.sum(-1) < 1).all())


def steer(moe: Moe, experts: list[int]) -> None:
    """Make the router choose these for every token, however the tokens look."""
    bias = torch.full((moe.config.experts,), -100.0)
    bias[experts] = torch.arange(len(experts), dtype=torch.float32)
    moe.router.bias = bias
    moe.router.weight_NK.zero_()  # type: ignore[operator]


@pytest.mark.parametrize("busy", [[3, 5], [0, 1]])
@pytest.mark.parametrize("count", [1, 17])
def test_idle_experts_are_not_read(busy: list[int], count: int) -> None:
    """All tokens go to two of six: the others' weights are not touched, theirs are read once each."""
    moe = build(replace(CONFIG, router_bias=True))
    steer(moe, busy)
    torch.testing.assert_close(moe(tokens(count)).double(), looped(moe, tokens(count)), atol=1e-5, rtol=1e-5)
    assert calls(moe) == [[count] if e in busy else [] for e in range(6)]


def test_all_tokens_to_one_expert() -> None:
    moe = build(replace(CONFIG, experts_per_token=1, router_bias=True))
    steer(moe, [4])
    torch.testing.assert_close(moe(tokens(9)).double(), looped(moe, tokens(9)), atol=1e-5, rtol=1e-5)
    assert calls(moe) == [[9] if e == 4 else [] for e in range(6)]


def test_each_expert_is_read_once_a_step() -> None:
    moe = build(CONFIG)
    moe(tokens(64))
    assert all(len(c) <= 1 for c in calls(moe))
    assert sum(sum(c) for c in calls(moe)) == 64 * 2


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    moe, x = build(CONFIG), tokens(12)
    whole = moe(x)
    for t in range(12):
        torch.testing.assert_close(moe(x[t : t + 1]), whole[t : t + 1], atol=1e-6, rtol=1e-6)
