"""Calibration text from a Hugging Face dataset, through a stand-in for the package."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexdecode.cli.calibration import calibration_text, check_dataset
from flexdecode.quantizer.job import prepare
from flexdecode.quantizer.options import Options
from tests.checkpoints import tiny


class Rows:
    """Rows without end, which remember how they were shuffled."""

    shuffled: Any = None

    def shuffle(self, **options: Any) -> Rows:
        Rows.shuffled = options
        return self

    def __iter__(self) -> Iterator[dict[str, str]]:
        while True:
            yield {"body": "some text that goes on"}


def install(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())


def test_a_dataset_is_streamed_as_far_as_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(tmp_path, num_hidden_layers=1)
    asked: list[Any] = []

    def load(*names: Any, **options: Any) -> Rows:
        asked.append((names, options))
        return Rows()

    install(monkeypatch, load)
    job = prepare(str(tmp_path), Options(samples=5, length=10, seed=3))
    text = calibration_text(job, None, "wiki:en", "validation", "body")
    assert asked == [(("wiki", "en"), {"split": "validation", "streaming": True})]
    assert Rows.shuffled == {"seed": 3, "buffer_size": 1000}
    assert len(text.pieces) == 5
    assert text.origin == "wiki:en"


def test_what_the_package_raises_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(tmp_path, num_hidden_layers=1)

    def load(*names: Any, **options: Any) -> Rows:
        raise RuntimeError("no such\n dataset")

    install(monkeypatch, load)
    job = prepare(str(tmp_path), Options())
    with pytest.raises(ValueError, match="--dataset wiki: no such dataset"):
        calibration_text(job, None, "wiki", "train", "text")


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    check_dataset(str(tmp_path), offline=True)
    with pytest.raises(ValueError, match="is read over the network, which --offline"):
        check_dataset("wiki", offline=True)
