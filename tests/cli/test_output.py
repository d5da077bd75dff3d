"""JSON, tables and bars."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from flexdecode.cli.output import Bars, print_report, write_json


def test_json_has_no_infinities_and_takes_any_key_and_value(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({1: float("nan"), "path": Path("a/b"), "set": {3}, "nested": [float("inf"), True, None]})
    data = json.loads(capsys.readouterr().out)
    assert data == {"1": None, "path": "a/b", "set": [3], "nested": [None, True, None]}


@pytest.mark.parametrize("encoding", ["utf-8", "UTF8", "ascii", "latin-1"])
def test_json_survives_every_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that cannot show a character must not turn it into `?` inside JSON."""
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding, errors="replace"))
    write_json({"text": "naïve 🙂 \ufffd"})
    assert json.loads(out.getvalue().decode(encoding)) == {"text": "naïve 🙂 \ufffd"}


def test_report_shows_sections_rows_and_units(capsys: pytest.CaptureFixture[str]) -> None:
    report = {
        "family": "llama [bold]",
        "weights_bytes": 1536,
        "tied": True,
        "window": None,
        "empty": [],
        "bytes": {"embedding": 2048, "layers": 4096},
        "layer_kinds": [{"kind": "sliding(512)", "layers": 5, "kv_bytes": 1024}, {"kind": "full", "layers": 1}],
    }
    print_report(report, "model")
    out = capsys.readouterr().out
    for text in ("llama [bold]", "1.5 KiB", "yes", "none", "2 KiB", "4 KiB", "sliding(512)", "1 KiB", "layer kinds"):
        assert text in out
    assert "weights_bytes" not in out


def test_bars_are_silent_when_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with Bars() as bars:
        bars("load", 1, 10)
        bars("load", 10, 10)
    assert capsys.readouterr() == ("", "")


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_appear_on_a_terminal_and_leave_with_their_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stderr = Tty()
    monkeypatch.setattr(sys, "stderr", stderr)
    with Bars() as bars:
        bars("load", 512, 1024)
        assert "reading weights" in stderr.getvalue()
        bars("load", 1024, 1024)
        bars("prefill", 0, 4096)
        assert "0 of 4,096 tokens" in stderr.getvalue()
    assert capsys.readouterr().out == ""
    assert "\x1b[2K" in stderr.getvalue().rsplit("tokens", 1)[1], "the bar's line is erased"
