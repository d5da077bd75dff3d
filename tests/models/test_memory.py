"""Loading holds one weight twice at most: peak memory against the weights as held, on a file of a real size.

The bound is on memory, not time: 1.15 times the weights plus 300 MB, in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, LAYERS, VOCAB, GROUP = 2048, 8192, 16, 128256, 128  # Llama-3.2-1B's


def write_awq_1b(d: Path) -> None:
    """An AWQ gemm checkpoint of that shape: random codes, zero points of 8."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}

    def int4(name: str, inputs: int, outputs: int) -> None:
        words = torch.randint(-(2**31), 2**31, (inputs, outputs // 8), generator=generator)
        tensors[f"{name}.qweight"] = words.to(torch.int32)
        tensors[f"{name}.qzeros"] = torch.full((inputs // GROUP, outputs // 8), -0x77777778, dtype=torch.int32)
        scales = torch.rand(inputs // GROUP, outputs, generator=generator) * 0.002 + 0.003
        tensors[f"{name}.scales"] = scales.half()

    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for name, inputs, outputs in (
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", HIDDEN, 512),
            ("self_attn.v_proj", HIDDEN, 512),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", HIDDEN, INNER),
            ("mlp.up_proj", HIDDEN, INNER),
            ("mlp.down_proj", INNER, HIDDEN),
        ):
            int4(layer + name, inputs, outputs)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = torch.ones(HIDDEN, dtype=torch.float16)
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.float16)
    tensors["model.embed_tokens.weight"] = (torch.randn(VOCAB, HIDDEN, generator=generator) * 0.02).half()
    save_file(tensors, d / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": VOCAB,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "dtype": "float16",
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    }
    (d / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("kind", ["awq file", "random int4"])
def test_peak_memory_of_a_1b_model(kind: str, tmp_path: Path) -> None:
    model = "random:llama-3.2-1b@int4"
    if kind == "awq file":
        write_awq_1b(tmp_path)
        model = str(tmp_path)
    argv = [sys.executable, "-m", "flexdecode", "inspect", model, "--measure", "--json"]
    measured = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)["measured"]
    assert measured["weights_held_bytes"] > 500e6
    taken = measured["peak_bytes"] - measured["before_loading_bytes"]
    assert taken <= 1.15 * measured["weights_held_bytes"] + 300e6, measured
