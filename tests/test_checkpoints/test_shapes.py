"""The known shapes against transformers, built without memory, and against the models' public sizes."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from flexdecode.checkpoints.shapes import SHAPES, tensor_shapes

# millions of parameters, as published; tied embeddings counted once
MILLIONS = {
    "llama-2-7b": 6738, "llama-3.1-8b": 8030, "llama-3.2-1b": 1236, "llama-3.2-3b": 3213, "smollm2-135m": 134.5,
    "smollm2-1.7b": 1711, "mistral-7b": 7242, "gemma-3-270m": 268, "gemma-3-1b": 1000, "qwen3-0.6b": 596,
    "qwen3-1.7b": 1721, "qwen3-8b": 8191, "qwen2.5-0.5b": 494, "phi-3-mini": 3821,
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_names_and_shapes_are_transformers(shape: str) -> None:
    config = dict(SHAPES[shape])
    cls = getattr(transformers, config["architectures"][0])
    keys = {k: v for k, v in config.items() if k not in ("architectures", "model_type", "torch_dtype")}
    with torch.device("meta"):
        model = cls(cls.config_class(**keys))
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}  # tied ones once
    assert tensor_shapes(config) == expected
    assert next(iter(tensor_shapes(config))) == "model.embed_tokens.weight"


@pytest.mark.parametrize("shape", MILLIONS)
def test_public_sizes(shape: str) -> None:
    total = sum(math.prod(s) for s in tensor_shapes(SHAPES[shape]).values())
    assert total / 1e6 == pytest.approx(MILLIONS[shape], rel=2e-3)


def test_every_shape_has_a_size() -> None:
    assert set(MILLIONS) | {"tiny"} == set(SHAPES)


def test_layers_of_gemma_3() -> None:
    """Five sliding layers to a full one; the last layer of the 1B model slides."""
    types = SHAPES["gemma-3-1b"]["layer_types"]
    assert [i for i, t in enumerate(types) if t == "full_attention"] == [5, 11, 17, 23]
    assert len(types) == 26
