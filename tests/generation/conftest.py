"""Decoders that the tests of the engine share: one for each way in which masks let go of pages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.generation.running import Oracle, model

# causal alone, a window everywhere, five windows to one full layer, windows and full layers with sinks
FAMILIES = ["llama", "mistral", "gemma3_text", "gpt_oss"]
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    hybrid = {"layer_types": ["sliding_attention", "full_attention"]}
    made = {f: model(tmp_path_factory.mktemp(f), f, **(SMALL | (hybrid if f[0] == "g" else {}))) for f in FAMILIES}
    made["sinks"] = model(tmp_path_factory.mktemp("sinks"), mask="window(24) | sinks(4)", **SMALL)
    return made


@pytest.fixture(scope="session")
def oracles(models: dict[str, Any]) -> dict[str, Oracle]:
    return {family: Oracle(decoder) for family, decoder in models.items()}
