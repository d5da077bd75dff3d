"""`inspect`: headers by default, memory on request."""

from __future__ import annotations

import json

import pytest

from flexdecode.cli.main import main
from tests.cli.fake import install


def test_reads_headers_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    argv = ["inspect", "m", "--context", "4096", "--revision", "r", "--offline", "--ignore-config", "k"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    asked = {"revision": "r", "offline": True, "ignore_config": ("k",), "context": 4096}
    assert script.calls == [("describe_model", "m", asked)]
    assert script.options == {}, "no model may be loaded"
    assert err == ""
    assert "3 MiB" in out
    assert "4,096" in out
    assert "1 KiB" in out


def test_json_gives_the_report_as_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert main(["inspect", "m", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {"family": "fake", "layers": 2, "weights_bytes": 3 << 20, "parts": {"embedding_bytes": 1024}}


def test_measure_loads_and_compares(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    assert main(["inspect", "m", "--measure", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert script.options["model"] == "m"
    assert measured["weights_held_bytes"] == 1 << 20
    grown = measured["peak_bytes"] - measured["before_loading_bytes"]
    assert measured["peak_minus_before_over_weights"] == pytest.approx(grown / (1 << 20))


def test_a_context_without_tokens_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    assert main(["inspect", "m", "--context", "0"]) == 1
    assert "--context is 0" in capsys.readouterr().err
