"""`pull`: what reaches the hub, what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexdecode.cli.main import main


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def pull(model_id: str, revision: str | None = None) -> Path:
        calls.append((model_id, revision))
        return Path("/cache/model")

    monkeypatch.setattr("flexdecode.checkpoints.hub.pull", pull)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("FLEXDECODE_OFFLINE", raising=False)
    return calls


def test_prints_the_directory_alone(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "owner/name", "--revision", "v2"]) == 0
    assert asked == [("owner/name", "v2")]
    assert capsys.readouterr().out == "/cache/model\n"


def test_json(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "owner/name", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"id": "owner/name", "revision": None, "path": "/cache/model"}


@pytest.mark.parametrize("variable", [None, "HF_HUB_OFFLINE", "FLEXDECODE_OFFLINE"])
def test_offline_contradicts_pull(
    variable: str | None, asked: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")
    assert main(["pull", "owner/name", *([] if variable else ["--offline"])]) == 1
    assert "owner/name" in capsys.readouterr().err
    assert asked == []
