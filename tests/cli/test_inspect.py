"""`inspect`: headers by default, memory on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexdecode.cli.main import main
from tests.checkpoints import tiny
from tests.cli.fake import install


def test_reads_headers_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    argv = ["inspect", "m", "--max-context", "4096", "--dtype", "fp32", "--kv-dtype", "int8"]
    argv += ["--revision", "r", "--offline", "--ignore-config", "k"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    asked = {"dtype": "fp32", "kv_dtype": "int8", "max_context": 4096}
    asked |= {"revision": "r", "offline": True, "ignore_config": ("k",)}
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


def test_needs_are_for_the_context_and_the_types_that_were_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny(tmp_path, num_hidden_layers=2)

    def needs(*flags: str) -> Any:
        assert main(["inspect", str(tmp_path), "--json", *flags]) == 0
        return json.loads(capsys.readouterr().out)["needs"]

    assert needs()["max_context"] == 256
    one, other = needs("--max-context", "64"), needs("--max-context", "128", "--kv-dtype", "int8", "--dtype", "fp32")
    assert one["kv_bytes"] == 64 * 2 * 2 * 2 * 32 * 2
    assert (other["kv_dtype"], other["kv_bytes"]) == ("int8", 128 * 2 * 2 * (2 * 32 + 8))
    assert other["weights_held_bytes"] == pytest.approx(2 * one["weights_held_bytes"], rel=0.05)
    assert one["fits"]
    assert main(["inspect", str(tmp_path), "--max-context", "0"]) == 1
    assert "max_context must be at least 1, got 0" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path), "--max-context", "257"]) == 1
    assert "max_context=257 is more than the 256" in capsys.readouterr().err
