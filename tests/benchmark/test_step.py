"""The step benchmark measures whole steps of the engine and exactly the products that they contain."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexdecode import LLM
from flexdecode.benchmark import step
from flexdecode.models.linear import Linear
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


def test_the_engine_is_left_as_it_was(tmp_path: Path) -> None:
    tiny(tmp_path)
    llm = LLM(tmp_path)
    free = llm.engine.cache.free_tokens()
    row = step.measure(llm, 40, 3)
    assert row["repetitions"] == 3
    assert row["fraction_of_products_alone"] > 0
    assert llm.engine.cache.free_tokens() == free
    assert not llm.engine.busy
    with pytest.raises(ValueError, match=r"300 tokens.*256"):
        step.measure(llm, 300, 3)
