"""Random weights: sizes, spread, repeatability; values mean nothing."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from flexdecode.checkpoints import random as our_random
from flexdecode.checkpoints.random import RandomSource
from flexdecode.checkpoints.shapes import SHAPES
from flexdecode.quantization.weights import Int4Weight, Int8Weight

KINDS = {"": Tensor, "@int4": Int4Weight, "@int8": Int8Weight}


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("shape", ["tiny", "smollm2-135m"])
def test_every_tensor(shape: str, weights: str) -> None:
    source = RandomSource(shape + weights)
    assert source.format == "random"
    assert source.config == SHAPES[shape]
    for name in source.names():
        weight = source.read(name)
        assert tuple(weight.shape) == source.shape(name)
        assert weight.nbytes == source.nbytes(name)
        if len(source.shape(name)) == 1:
            assert isinstance(weight, Tensor)
            assert torch.equal(weight, torch.ones(weight.shape).bfloat16())
            continue
        assert isinstance(weight, KINDS[weights])
        full = weight.float() if isinstance(weight, Tensor) else weight.dequantize()
        k = source.shape(name)[1]
        assert float(full.std()) == pytest.approx(1 / math.sqrt(k), rel=0.05)
        assert abs(float(full.mean())) < 0.2 / math.sqrt(k)
        assert not any(torch.equal(a, b) for a, b in pairwise(full[:200]))


def test_groups() -> None:
    source = RandomSource("gemma-3-1b@int4")
    big, odd = (
        source.read("model.layers.0.mlp.gate_proj.weight"),
        RandomSource("smollm2-135m@int4").read("model.layers.0.self_attn.q_proj.weight"),
    )
    assert isinstance(big, Int4Weight)
    assert isinstance(odd, Int4Weight)
    assert big.group_size == 128  # 1152 columns
    assert odd.group_size == 32  # 576 columns
    assert big.scales_NG.dtype == torch.float16
    assert bool((big.zeros_NG == 8).all())


def test_tensors_are_functions_of_their_names() -> None:
    first, second = RandomSource("tiny"), RandomSource("tiny")
    names = ["model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    a, b = (first.read(name) for name in names)
    c, d = (second.read(name) for name in reversed(names))
    assert torch.equal(a, d)  # type: ignore[arg-type]
    assert torch.equal(b, c)  # type: ignore[arg-type]
    assert not torch.equal(a, b)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1, 5, 7, 10, 11, 30, 33])
def test_tiling(size: int) -> None:
    block = torch.arange(7)
    tiled = our_random._tile(block, "name", size)
    assert len(tiled) == size
    assert all((int(b) - int(a)) % 7 == 1 for a, b in pairwise(tiled))


def test_norms_of_gemma_are_zero() -> None:
    """Gemma multiplies by 1 + weight."""
    assert RandomSource("gemma-3-270m").read("model.norm.weight").tolist() == [0.0] * 640  # type: ignore[union-attr]


def test_biases_are_zero() -> None:
    source = RandomSource("qwen2.5-0.5b@int4")
    assert source.read("model.layers.0.self_attn.q_proj.bias").tolist() == [0.0] * 896  # type: ignore[union-attr]


def test_int8_codes_are_symmetric() -> None:
    weight = RandomSource("smollm2-135m@int8").read("model.embed_tokens.weight")
    assert isinstance(weight, Int8Weight)
    assert int(weight.codes_NK.min()) == -127


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("llama-9", r"unknown shape 'llama-9'; known: llama-2-7b, llama-3\.1-8b"),
        ("", "unknown shape ''"),
        ("tiny@int3", "unknown weights 'int3'; they are @int4, @int8"),
        ("tiny@", "unknown weights ''"),
        ("tiny@int4@int8", "unknown weights 'int4@int8'"),
    ],
)
def test_unknown(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RandomSource(spec)


def test_absent_tensor() -> None:
    with pytest.raises(ValueError, match=r"random:tiny: holds no tensor x"):
        RandomSource("tiny").read("x")
