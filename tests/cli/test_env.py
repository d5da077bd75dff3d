"""`env`: a report that a person can read and a program can parse."""

from __future__ import annotations

import json

import pytest

from flexdecode import __version__
from flexdecode.cli.main import main

SECTIONS = {"versions", "cpu", "memory", "torch", "compiler", "cuda_devices", "demo_model", "variables"}


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXDECODE_SEED", "7")
    monkeypatch.setenv("FLEXDECODE_API_KEY", "secret")
    assert main(["env", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert err == ""
    assert set(report) >= SECTIONS
    assert report["flexdecode"] == __version__
    assert report["variables"]["FLEXDECODE_SEED"] == "7"
    assert "secret" not in out


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "transformers" in out
    assert "compiler" in out
