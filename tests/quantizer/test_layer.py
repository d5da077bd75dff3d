"""Scales that are moved change nothing, whatever the family; and the faults that made others' results wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import LLM
from flexdecode.checkpoints.open import open_source
from flexdecode.models.load import WeightLoader
from flexdecode.quantizer.job import Job
from flexdecode.quantizer.layer import LayerQuantizer
from flexdecode.quantizer.layers import Runner, Weights, read_layer
from flexdecode.quantizer.observe import Observer
from tests.checkpoints import FAMILIES, edit_tensors, tiny
from tests.oracles import ids
from tests.quantizer.making import job_of, made, pieces

CPU = torch.device("cpu")
LENGTHS = (30, 25, 9)


class OneLayer:
    """A layer of a tiny model, its inputs, and a quantizer that has seen them."""

    def __init__(self, job: Job, index: int = 0, negative: bool = False) -> None:
        self.runner = Runner(job.config, CPU, LENGTHS)
        loader = WeightLoader(job.source, job.config, job.names, torch.float32, CPU)
        self.weights: Weights = read_layer(loader, job.config, index, job.targets(index))
        self.layer = self.runner.build(index, self.weights)
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(sum(LENGTHS), job.config.hidden_size, generator=generator)
        self.hidden[:, ::17] *= 12
        if negative:
            self.hidden[:, 3] = -5 + 0.1 * self.hidden[:, 3]
        self.index = index
        observer = Observer(job.config.layers[index], self.weights, job.of_layer(index), f"layers.{index}.")
        self.before = self.outputs()
        self.inputs = observer.finish()
        self.quantizer = LayerQuantizer(
            job.config.layers[index],
            self.weights,
            job.of_layer(index),
            f"layers.{index}.",
            job.options,
            job.saved_names.norm_offset,
            lambda name: next(iter(job.source.dtypes.values())),
            self.inputs,
        )

    @torch.inference_mode()
    def outputs(self) -> Tensor:
        return torch.cat([y for _, y in self.runner.run(self.index, self.layer, self.hidden)])


def assert_same(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> None:
    assert float((a - b).abs().max()) <= tolerance * float(b.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_smoothing_is_an_identity(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """B30. Gemma's 1 + w and its sandwich of norms, biases, fused matrices, experts; in bf16 too, where norms cannot
    hold every quotient."""
    tiny(tmp_path, family, gain=2.0, dtype=dtype, num_hidden_layers=1)
    one = OneLayer(job_of(tmp_path))
    old = {name: linear.weight_NK.clone() for name, linear in one.weights.linears.items()}
    one.quantizer.smooth()
    moved = [name for name, linear in one.weights.linears.items() if not torch.equal(linear.weight_NK, old[name])]
    assert "qkv" in moved
    if family == "qwen2" and dtype == torch.bfloat16:  # a bias that was divided is rounded to what the file holds
        assert_same(one.outputs(), one.before, 1e-2)
    else:
        assert_same(one.outputs(), one.before)


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_values_take_the_scale_of_their_heads(family: str, kv_heads: int, tmp_path: Path) -> None:
    """B32. v to o under every ratio of heads, with a bias and with q, k and v in one matrix."""
    more: dict[str, Any] = {"attention_bias": True} if family == "llama" else {}
    tiny(tmp_path, family, num_key_value_heads=kv_heads, num_hidden_layers=1, **more)
    one = OneLayer(job_of(tmp_path))
    old = one.weights.linears["out"].weight_NK.clone()
    one.quantizer.smooth()
    assert not torch.equal(one.weights.linears["out"].weight_NK, old)
    assert_same(one.outputs(), one.before)


def test_what_stays_in_float_keeps_its_digits(tmp_path: Path) -> None:
    """Beside a matrix that is left in float, scales are powers of two: in bf16 it is as exact as it was."""
    tiny(tmp_path, dtype=torch.bfloat16, num_hidden_layers=1)
    one = OneLayer(job_of(tmp_path, skip=("k_proj", "up_proj")))
    one.quantizer.smooth()
    k = one.weights.linears["qkv"].weight_NK[128:192]
    up = one.weights.linears["gate_up"].weight_NK[256:]
    assert torch.equal(k.bfloat16().float(), k)
    assert torch.equal(up.bfloat16().float(), up)


def test_a_router_keeps_its_choice(tmp_path: Path) -> None:
    """The router reads what the experts read; its logits are the same to the bit."""
    tiny(tmp_path, "qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=1)
    one = OneLayer(job_of(tmp_path))
    norm, router = one.weights.norms["feed_forward_pre_norm"], one.weights.linears["router"]
    x = torch.randn(20, 128)
    before, old = router(norm(x)), router.weight_NK.clone()
    one.quantizer.smooth()
    assert not torch.equal(router.weight_NK, old)
    assert torch.equal(router.weight_NK.bfloat16().float(), router.weight_NK)
    assert_same(router(norm(x)), before, 1e-6)


def test_experts_that_no_token_chose_are_rounded_all_the_same(tmp_path: Path) -> None:
    tiny(tmp_path / "float", "mixtral", num_hidden_layers=1, num_local_experts=8)

    def prefer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The router's rows of experts 2 to 7 are the negative of those of 0 and 1."""
        name = next(n for n in tensors if n.endswith("mlp.gate.weight") or n.endswith("block_sparse_moe.gate.weight"))
        rows = tensors[name].clone()
        rows[2:] = -10 * rows[0]
        tensors[name] = rows
        return tensors

    edit_tensors(tmp_path / "float", prefer)
    records = made(tmp_path / "float", tmp_path / "out", pieces(2, 6))
    seen = {r.module: r.tokens for r in records if r.module.endswith("w2")}
    assert len(seen) == 8
    assert all(r.after is not None and r.after < 0.2 for r in records if r.kind == "int4")
    assert torch.isfinite(LLM(tmp_path / "out", dtype="fp32").logits(ids(20))).all()


def test_degenerate_weights(tmp_path: Path) -> None:
    """B28. Rows, groups and a whole matrix of zeros, an input channel that is dead: nothing is NaN, zeros come back,
    and the error is about that of the model as it was."""
    tiny(tmp_path / "float", gain=1.0, num_hidden_layers=2)

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.layers.0.mlp.up_proj.weight"][:32] = 0
        tensors["model.layers.0.mlp.gate_proj.weight"][:, 32:64] = 0
        tensors["model.layers.1.self_attn.o_proj.weight"].zero_()
        tensors["model.embed_tokens.weight"][:, 5] = 0
        return tensors

    def error(source: Path, out: Path) -> float:
        made(source, out, pieces(4, 40))
        llm, prompt = LLM(out, dtype="fp32"), ids(40)
        wanted = LLM(source, dtype="fp32").logits(prompt)
        return float((llm.logits(prompt) - wanted).norm() / wanted.norm())

    usual = error(tmp_path / "float", tmp_path / "usual")
    edit_tensors(tmp_path / "float", spoil)
    assert error(tmp_path / "float", tmp_path / "out") <= 1.3 * usual
    source = open_source(tmp_path / "out")
    for name in source.names():
        weight = source.read(name)
        assert torch.isfinite(weight if isinstance(weight, Tensor) else weight.dequantize()).all(), name
    up, o = (source.read(f"model.layers.{name}.weight") for name in ("0.mlp.up_proj", "1.self_attn.o_proj"))
    assert not isinstance(up, Tensor)
    assert not isinstance(o, Tensor)
    assert not up.dequantize()[:32].any()
    assert not o.dequantize().any()


def test_an_input_whose_mean_is_negative(tmp_path: Path) -> None:
    """B31. Sizes are means of |x|: a channel around -5 has a scale like any other."""
    tiny(tmp_path, num_hidden_layers=1)
    one = OneLayer(job_of(tmp_path), negative=True)
    assert float(one.inputs["qkv"].mean_size()[3]) > 1
    one.quantizer.smooth()
    assert all(torch.isfinite(linear.weight_NK).all() for linear in one.weights.linears.values())
    assert all(torch.isfinite(norm.weight).all() for norm in one.weights.norms.values())
