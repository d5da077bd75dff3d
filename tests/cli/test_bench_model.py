"""`bench prefill | decode | grid | latency | engine`: the whole way, on a tiny model. No figure is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexdecode.cli.main import main
from flexdecode.llm import LLM
from tests.test_import_time import PROGRAM, loaded_by

TINY = "random:tiny@int4"
SHORT = ["--repetitions", "1", "--max-context", "128"]
COMMANDS = {
    "prefill": [*SHORT, "--lengths", "20"],
    "decode": [*SHORT, "--lengths", "20"],
    "grid": [*SHORT, "--lengths", "8"],
    "latency": [*SHORT, "--input", "8", "--output", "4", "--batch-size", "2"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_row_says_what_was_measured(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, TINY, *COMMANDS[name], "--kv-dtype", "int8", "--mask", "window(8)", "--json"]) == 0
    told = capsys.readouterr()
    (row,) = json.loads(told.out)
    assert (row["benchmark"], row["model"]) == (name, TINY)
    assert (row["kv_dtype"], row["mask"]) == ("int8", "causal() & window(8)")
    assert row["quantization"].startswith("int4 g128")
    assert row["fraction_of_floor"] > 0
    assert told.err == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_table_a_file_and_a_plot(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--out", str(tmp_path / "rows.jsonl"), "--plot", str(tmp_path / "speed.png")]
    assert main(["bench", name, TINY, *COMMANDS[name], *files]) == 0
    assert f"{name.capitalize()} of {TINY}" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "speed.png"]
    assert json.loads((tmp_path / "rows.jsonl").read_text())["benchmark"] == name


def test_backends_stand_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "decode", TINY, *SHORT, "--lengths", "20,30", "--attention", "reference,sdpa", "--fill", "random"]
    assert main(argv) == 0
    told = capsys.readouterr().out
    assert "| Length | reference | sdpa | Speedup | of floor |" in told
    assert "keys and values drawn at random" in told


def test_the_engine_is_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--running", "3", "--input", "8", "--output", "12", "--known", "80"]
    rows = tmp_path / "rows.jsonl"
    assert main(["bench", "engine", TINY, "--repetitions", "1", *sizes, "--out", str(rows)]) == 0
    told = capsys.readouterr().out
    works = ["a token, 3 running", "3 x (8 + 12) tokens", "a step, one running", "first token, 80 known and 16 new"]
    assert [json.loads(line)["work"] for line in rows.read_text().splitlines()] == works
    assert [line.split(" | ")[0] for line in told.splitlines() if line.startswith("| ")][2:] == [
        f"| {w}" for w in works
    ]


def test_a_failed_row_ends_in_1_after_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["bench", "grid", TINY, *SHORT, "--batch", "99,1", "--lengths", "8"]) == 1
    told = capsys.readouterr()
    assert "| 99 | 8 | 8 | failed |" in told.out
    assert "- batch 99, 8 + 8 tokens: ValueError: 99 sequences" in told.out
    assert "1 of 2 rows failed" in told.err


@pytest.mark.parametrize("argv", [["decode", "--help"], ["grid", TINY, "--nonsense"]], ids=" ".join)
def test_help_and_wrong_usage_start_at_once(argv: list[str]) -> None:
    assert loaded_by(PROGRAM.format(argv=["bench", *argv], code=2 if "--nonsense" in argv else 0)) == set()


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["bench", *argv]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    return told.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["prefill", TINY, "--lengths", "1k"], "--lengths '1k' is not a list"),
        (["decode", TINY, "--fill", "zeros"], "--fill 'zeros' is not known (known: prefill, random)"),
        (["decode", TINY, "--attention", "cpu,fast"], "'fast' is not known"),
        (["decode", TINY, "--repetitions", "0"], "--repetitions 0"),
        (["decode", TINY, "-o", "xml"], "--format 'xml'"),
        (["grid", TINY, "--batch", "0"], "--batch '0'"),
        (["grid", TINY, "--plot", "absent/speed.png"], "--plot absent/speed.png: there is no folder"),
        (["grid", TINY, "--out", "absent/rows"], "absent/rows"),
        (["latency", TINY, "--batch-size", "0"], "--batch-size 0 must be at least 1"),
        (["latency", TINY, "--input", "0"], "--input 0 must be at least 1"),
        (["engine", TINY, "--running", "0"], "--running 0 must be at least 1"),
        (["engine", TINY, "--output", "1"], "--output 1 must be at least 2"),
        (["engine", TINY, "--plot", "speed.png"], "--plot speed.png"),
    ],
)
def test_wrong_values_are_one_line_before_a_model_is_read(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a model was made")

    monkeypatch.setattr(LLM, "__init__", never)
    assert words in refused(argv, capsys)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["prefill", TINY, "--lengths", "5000"], "--lengths 5000 needs a context of 5001 tokens, and it ends at 2048"),
        (["decode", TINY, "--lengths", "5000"], "--lengths 5000"),
        (["grid", TINY], "--lengths 4096"),
        (["latency", TINY, "--output", "1"], "--output 1"),
        (["engine", TINY, "--known", "5000"], "--known 5000 needs a context of 5017 tokens"),
        (["prefill", "random:nothing"], "unknown shape 'nothing'"),
        (["decode", "random:nothing", "--attention", "sdpa,cpu"], "unknown shape 'nothing'"),
    ],
)
def test_what_a_model_cannot_do_is_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refused(argv, capsys)
