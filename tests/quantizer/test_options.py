"""What may be asked for, and what is refused before anything is read."""

from __future__ import annotations

from typing import Any

import pytest

from flexdecode.quantizer.options import Options, pattern


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "gptq"}, "--method 'gptq' is not known: awq, rtn, int8"),
        ({"format": "gguf"}, "--format 'gguf' is not known: auto, awq-gemm, compressed-tensors"),
        ({"odd_widths": "pad"}, "--odd-widths 'pad' is not known: refuse, leave, smaller"),
        ({"next_inputs": "both"}, "--next-inputs 'both' is not known: float, quantized"),
        ({"dtype": "int8"}, "--dtype 'int8' is not known: float32, bfloat16, float16"),
        ({"group_size": 48}, "--group-size 48 is not one of 32, 64, 128, or -1"),
        ({"group_size": 0}, "--group-size 0"),
        ({"method": "int8", "format": "awq-gemm"}, "int8 cannot be saved as awq-gemm"),
        ({"method": "int8", "symmetric": True}, "--symmetric goes with int4"),
        ({"odd_widths": "smaller"}, "needs --format compressed-tensors"),
        ({"samples": 0}, "--samples must be at least 1, got 0"),
        ({"length": -2}, "--length must be at least 1, got -2"),
        ({"skip": ("re:(",)}, "is not a regular expression"),
    ],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        Options(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_formats() -> None:
    assert Options().layout == "gemm"
    assert Options(method="int8").layout == "int-quantized"
    assert Options(format="compressed-tensors", method="rtn").layout == "pack-quantized"
    assert Options(method="int8").quant_config(-1).zero_point is False


def test_only_what_a_method_uses_is_told() -> None:
    assert "seed" in Options().as_dict()
    assert not {"seed", "clip", "length"} & Options(method="rtn").as_dict().keys()
    assert "group_size" not in Options(method="int8").as_dict()


@pytest.mark.parametrize(
    ("entry", "module", "hit"),
    [
        ("k_proj", "model.layers.3.self_attn.k_proj", True),
        ("self_attn.k_proj", "model.layers.3.self_attn.k_proj", True),
        ("proj", "model.layers.3.self_attn.k_proj", False),
        ("gate", "model.layers.3.mlp.gate_proj", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("layers.1", "model.layers.1.mlp.up_proj", False),
        ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj", True),
        ("re:.*layers\\.[01]\\..*", "model.layers.1.mlp.up_proj", True),
        ("re:.*layers\\.[01]\\..*", "model.layers.11.mlp.up_proj", False),
        ("re:k_proj", "model.layers.3.self_attn.k_proj", False),
    ],
)
def test_entries_of_skip_mean_whole_parts_of_a_name(entry: str, module: str, hit: bool) -> None:
    """B21. model.layers.1 is not model.layers.11."""
    assert (pattern(entry).fullmatch(module) is not None) == hit
