"""Where rows go: stdout, a file, a plot; and what is kept of a run that breaks off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexdecode.cli.bench_report import ReportOptions, RowFile
from tests.benchmark.test_report import DECODE, failed


def test_a_file_is_replaced_when_a_run_ends_well_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("older\n")
    with RowFile(path) as file:
        file.add("one\n")
        assert path.read_text() == "older\n"
        assert (tmp_path / "rows.jsonl.part").read_text() == "one\n", "row by row"
    assert path.read_text() == "one\n"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("form", ["md", "csv", "json", "jsonl"])
def test_stdout_has_the_form_and_the_file_has_lines(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ReportOptions(form, tmp_path / "rows").write(iter(DECODE), json=False)
    printed = capsys.readouterr()
    assert printed.out.startswith(
        {"md": "Decode of", "csv": "benchmark,", "json": "[\n", "jsonl": '{"benchmark"'}[form]
    )
    assert printed.err == ""
    assert [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()] == DECODE


def test_json_is_one_value(capsys: pytest.CaptureFixture[str]) -> None:
    ReportOptions().write(iter(DECODE), json=True)
    assert json.loads(capsys.readouterr().out) == DECODE


def test_lines_come_as_they_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    told = []

    def rows() -> Iterator[dict[str, Any]]:
        for row in DECODE:
            yield row
            told.append(capsys.readouterr().out)

    ReportOptions("jsonl").write(rows(), json=False)
    assert [json.loads(line) for line in told] == DECODE


def test_what_broke_off_shows_what_it_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from DECODE[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ReportOptions(out=tmp_path / "rows").write(rows(), json=False)
    told = capsys.readouterr()
    assert "| 1024 | 10.00 | 30.00 |" in told.out
    assert "measured so far (2) are in" in told.err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.part"]


def test_failed_rows_are_an_error_after_everything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [DECODE[0], failed(DECODE[1])]
    options = ReportOptions(out=tmp_path / "rows", plot=tmp_path / "speed.png")
    with pytest.raises(ValueError, match="1 of 2 rows failed; each says why"):
        options.write(iter(rows), json=False)
    assert "cannot serve" in capsys.readouterr().out
    assert len((tmp_path / "rows").read_text().splitlines()) == 2
    assert (tmp_path / "speed.png").exists()


def test_where_nothing_was_measured_nothing_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 of 1 rows failed"):
        ReportOptions(plot=tmp_path / "speed.png").write(iter([failed(DECODE[0])]), json=False)
    assert not (tmp_path / "speed.png").exists()


def test_what_cannot_be_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ReportOptions(plot=tmp_path / "speed.png").check()
    with pytest.raises(ValueError, match=r"--format 'xml' is not known \(known: md, csv, json, jsonl\)"):
        ReportOptions("xml").check()
    with pytest.raises(ValueError, match=r"--plot .* there is no folder"):
        ReportOptions(plot=tmp_path / "absent" / "speed.png").check()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--plot draws with matplotlib, which is not installed"):
        ReportOptions(plot=tmp_path / "speed.png").check()
