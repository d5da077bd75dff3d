"""The step benchmark measures whole steps of the engine and exactly the products that they contain."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexdecode import LLM
from flexdecode.benchmark import step
from flexdecode.models.linear import Linear
from tests.benchmark.columns import EVERY_ROW
from tests.checkpoints import tiny


@pytest.mark.parametrize(("family", "a_layer"), [("llama", 4), ("mixtral", 2 + 1 + 2 * 2)])
def test_every_product_of_a_step_is_counted_once(family: str, a_layer: int, tmp_path: Path) -> None:
    tiny(tmp_path, family)
    llm = LLM(tmp_path)
    modules = [module for module, _ in step._products(llm)]
    assert len(modules) == len(set(modules)) == 4 * a_layer + 1
    if family == "llama":
        every = [m for m in llm.engine.model.modules() if isinstance(m, Linear)]
        assert set(every) == set(modules)


@pytest.mark.parametrize(
    ("family", "attention"), [("llama", "auto"), ("gemma2", "auto"), ("mixtral", "auto"), ("llama", "sdpa")]
)
def test_every_part_of_a_step_is_told(family: str, attention: str, tmp_path: Path) -> None:
    """Whether layers run as one call or as modules, each operator has its time, and those that read their bytes."""
    tiny(tmp_path, family)
    llm = LLM(tmp_path, attention=attention)
    free = llm.engine.cache.free_tokens()
    row = step.measure(llm, "tiny", 40, 3)
    assert set(row) >= EVERY_ROW
    assert row["repetitions"] == 3
    assert row["fraction_of_floor"] > 0
    operators = {part["operator"]: part for part in row["operators"]}
    feed_forward = {"experts"} if family == "mixtral" else {"gate and up", "down"}
    rope = {"rope and cache"} if attention == "auto" else set()
    assert set(operators) - {"norms", "embedding"} == {"qkv", "attention", "out", "head", *rope, *feed_forward}
    assert all(part["ms"] > 0 for part in operators.values())
    rest = llm.engine.model.embed.row_bytes if "embedding" not in operators else 0
    told = sum(part["bytes"] for part in operators.values())
    assert told + rest == row["weights_read_bytes"] + row["kv_read_bytes"]
    assert 0 < row["outside_kernels_fraction"] < 1
    assert llm.engine.cache.free_tokens() == free
    assert not llm.engine.busy
    stack = llm.engine.model.stack
    assert stack is not None
    assert not any(module._forward_hooks for module in llm.engine.model.modules())


def test_a_context_that_is_too_short(tmp_path: Path) -> None:
    tiny(tmp_path)
    with pytest.raises(ValueError, match=r"--context 300 and --repetitions 3.*309.*256"):
        step.measure(LLM(tmp_path), "tiny", 300, 3)
