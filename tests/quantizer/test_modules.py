"""Which matrices are quantized: widths, rows, exclusions, experts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flexdecode.quantizer.modules import by_target
from tests.checkpoints import tiny
from tests.quantizer.making import job_of


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """B38. An intermediate size that no group divides."""
    d = tmp_path_factory.mktemp("odd")
    tiny(d, intermediate_size=200, num_hidden_layers=2)
    return d


def fates(source: Path, **options: Any) -> Counter[tuple[str, int]]:
    return Counter((m.kind, m.group) for m in job_of(source, **options).modules)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_width_that_no_group_divides_is_refused_by_name(odd: Path, group: int) -> None:
    with pytest.raises(ValueError) as caught:
        job_of(odd, group_size=group)
    words = str(caught.value)
    assert f"model.layers.0.mlp.down_proj has 200 columns, which groups of {group} do not divide" in words
    assert "usable groups: -1; or --odd-widths leave" in words


def test_odd_widths_are_left_or_take_a_smaller_group(odd: Path, tmp_path: Path) -> None:
    assert fates(odd, odd_widths="leave") == {("int4", 32): 12, ("float", 0): 2}
    left = [m for m in job_of(odd, odd_widths="leave").modules if not m.quantized]
    assert {m.name.rpartition(".")[2] for m in left} == {"down_proj"}
    assert left[0].why == "has 200 columns, which groups of 32 do not divide"
    tiny(tmp_path, intermediate_size=192, num_hidden_layers=1)
    smaller = {"odd_widths": "smaller", "format": "compressed-tensors", "group_size": 128}
    assert fates(tmp_path, **smaller) == {("int4", 128): 6, ("int4", 64): 1}


def test_channel_groups(odd: Path) -> None:
    """B40. -1 is one group a row."""
    assert fates(odd, group_size=-1) == {("int4", -1): 14}


def test_a_group_wider_than_the_matrix(tmp_path: Path) -> None:
    """B40."""
    tiny(tmp_path, hidden_size=64, head_dim=16, intermediate_size=128, num_hidden_layers=1)
    with pytest.raises(ValueError, match="q_proj has 64 columns, fewer than a group of 128; usable groups: 32, 64, -1"):
        job_of(tmp_path, group_size=128)


def test_rows_that_awq_cannot_pack(tmp_path: Path) -> None:
    """B39. Rows that are no multiple of 8: refused for awq-gemm, fine in int8 and in compressed-tensors."""
    tiny(tmp_path, num_key_value_heads=1, num_attention_heads=1, head_dim=12, num_hidden_layers=1)
    with pytest.raises(ValueError, match="q_proj has 12 rows, and awq-gemm packs rows by 8; --odd-widths leave"):
        job_of(tmp_path, skip=("o_proj",))
    assert fates(tmp_path, method="int8") == {("int8", -1): 7}
    assert fates(tmp_path, skip=("o_proj",), format="compressed-tensors")["int4", 32] == 6


def test_skip(odd: Path) -> None:
    """B21, B35."""
    job = job_of(odd, odd_widths="leave", skip=("k_proj", "model.layers.1.mlp"))
    left = {m.name for m in job.modules if not m.quantized}
    assert left == {
        "model.layers.0.self_attn.k_proj",
        "model.layers.1.self_attn.k_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.1.mlp.down_proj",
    }
    with pytest.raises(ValueError, match="--skip 'gate' matches no matrix, such as model"):
        job_of(odd, odd_widths="leave", skip=("gate",))
    with pytest.raises(ValueError, match="nothing would be quantized"):
        job_of(odd, skip=("re:.*",))


def test_routers_and_fused_experts_stay(tmp_path: Path) -> None:
    tiny(tmp_path / "a", "qwen3_moe", num_hidden_layers=2)
    kinds = Counter(m.kind for m in job_of(tmp_path / "a").modules)
    assert kinds == {"int4": 2 * (4 + 4 * 3), "float": 2}
    tiny(tmp_path / "b", "gpt_oss", num_hidden_layers=2)
    job = job_of(tmp_path / "b")
    assert {m.kind for m in job.modules if "experts" in m.name} == {"kept"}
    assert job.kept_names(0) == [
        f"model.layers.0.mlp.experts.{name}"
        for name in ("down_proj", "down_proj_bias", "gate_up_proj", "gate_up_proj_bias")
    ]


def test_rows_of_a_target_follow_each_other(odd: Path) -> None:
    modules = by_target(job_of(odd, odd_widths="leave").modules)["layers.0.qkv"]
    assert [(m.start, m.stop) for m in modules] == [(0, 128), (128, 192), (192, 256)]
