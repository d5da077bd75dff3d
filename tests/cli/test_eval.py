"""`eval`: what it prints, what it keeps, what it refuses. The figures themselves are tested in tests/evaluation."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flexdecode import LLM
from flexdecode.cli.main import main
from flexdecode.evaluation.perplexity import perplexity
from tests.checkpoints import tiny
from tests.evaluation.models import TEXT

ORIGIN = {"flexdecode", "torch", "python", "cpu", "threads", "commit", "dirty", "date"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    d = tmp_path_factory.mktemp("model")
    tiny(d, gain=2.0)
    return str(d)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["eval", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_perplexity_is_the_librarys(model: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    row = run(capsys, "perplexity", model, "--text", text, "--context", "64", "--stride", "16", "--dtype", "fp32")
    found = perplexity(LLM(model, dtype="fp32"), [TEXT], context=64, stride=16)
    assert row["perplexity"] == found.perplexity
    assert row["tokens"] == found.tokens == len(TEXT.encode()) - 1
    assert (row["section"], row["text"], row["dtype"], row["mask"]) == ("perplexity", text, "float32", None)
    assert row.keys() >= ORIGIN


def test_rows_are_appended(model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    argv = ["perplexity", model, "--text", text, "--context", "64", "-o", str(out)]
    rows = [run(capsys, *argv, "--mask", mask) for mask in ("causal", "window(4)")]
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows
    assert [row["mask"] for row in rows] == ["causal", "window(4)"]
    assert rows[0]["text_sha256"] == rows[1]["text_sha256"]
    assert rows[0]["perplexity"] != rows[1]["perplexity"]


def test_stdin_lines_and_the_built_in_text(
    model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    piped = run(capsys, "perplexity", model, "--text", "-", "--context", "64")
    plain = run(capsys, "perplexity", model, "--text", text, "--context", "64")
    assert piped["text"] == "stdin"
    assert (piped["text_sha256"], piped["nll"]) == (plain["text_sha256"], plain["nll"])
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": part}) + "\n" for part in ("abc", "de", "f")))
    row = run(capsys, "perplexity", model, "--text", str(lines))
    assert (row["documents"], row["tokens"]) == (3, 3)
    row = run(capsys, "perplexity", model, "--stride", "256", "--limit", "500")
    assert (row["text"], row["tokens"]) == ("pydoc_data.topics", 499)
    row = run(capsys, "perplexity", model, "--stride", "256")
    assert row["tokens"] == 4095


def test_perplexity_in_words(model: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "perplexity", model, "--text", text, "--context", "64"]) == 0
    out = capsys.readouterr().out
    assert "±" in out
    assert f"{len(TEXT.encode()) - 1} tokens of" in out
    assert "64 tokens, 32 apart, no BOS" in out


def test_divergence_of_a_variant_and_of_nothing(model: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    on = ["--text", text, "--context", "64"]
    row = run(capsys, "divergence", model, "--kv-dtype", "int8", *on)
    assert (row["against"], row["kv_dtype"], row["tokens"]) == (model, "int8", len(TEXT.encode()) - 1)
    assert (row["reference"]["dtype"], row["reference"]["kv_dtype"]) == ("bfloat16", "bfloat16")
    assert row["kl"] > 0
    assert [bucket["first"] for bucket in row["by_position"]] == [0, 16]
    assert run(capsys, "divergence", model, "--against", model, *on)["kl"] == 0
    same = ["--dtype", "fp32", "--against-dtype", "fp32"]
    assert run(capsys, "divergence", model, "--against", model, *same, *on)["kl"] == 0


def test_divergence_in_words(model: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["eval", "divergence", model, "--mask", "window(8)", "--text", text, "--context", "32"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    for words in ("same likeliest token", "by position in the window", "before token", "32 tokens side by side"):
        assert words in out


def test_a_model_is_not_compared_with_itself(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "divergence", model, "--threads", "1"]) == 2
    assert "would be compared with itself" in capsys.readouterr().err


def test_vocabularies_are_compared_before_anything_is_loaded(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(tmp_path, vocab_size=300)
    monkeypatch.setattr("flexdecode.llm.LLM", None)
    assert main(["eval", "divergence", model, "--against", str(tmp_path)]) == 1
    assert "a vocabulary of 300 and the model one of 264" in capsys.readouterr().err


def test_the_context_is_what_both_take(
    model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny(tmp_path, max_position_embeddings=100)
    argv = ["divergence", model, "--against", str(tmp_path), "--text", text]
    assert run(capsys, *argv)["context"] == 100
    assert run(capsys, *argv, "--max-context", "80")["context"] == 80
    assert main(["eval", *argv, "--context", "101"]) == 1
    assert "context=101 is more than the model's 100" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["perplexity", "divergence"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--text", "absent.txt"], "--text absent.txt: No such file"),
        (["--out", "absent/rows.jsonl"], "there is no folder absent"),
        (["--out", "."], "--out .: it is a folder"),
        (["--context", "257"], "context=257 is more than the model's 256"),
        (["--limit", "0"], "limit must be at least 1"),
    ],
)
def test_mistakes_are_one_line(
    verb: str, options: list[str], words: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", verb, model, "--kv-dtype", "int8", *options]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    d = tmp_path_factory.mktemp("long")
    tiny(d, gain=2.0, max_position_embeddings=1024)
    return str(d)


def test_needle_as_rows_and_picture(long_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, png = tmp_path / "rows.jsonl", tmp_path / "map.png"
    argv = ["needle", long_model, "--lengths", "400,600", "--depths", "0,100", "--trials", "2", "--first-trial", "5"]
    row = run(capsys, *argv, "-o", str(out), "--png", str(png))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["length"], r["depth"], r["trial"]) for r in lines] == [
        (n, d, t) for n in (400, 600) for d in (0.0, 1.0) for t in (5, 6)
    ]
    assert all(r.keys() >= ORIGIN | {"likelihood", "found", "model", "mask"} for r in lines)
    assert row["trials"] == [{key: r[key] for key in row["trials"][0]} for r in lines]
    assert row["asked"] == 8
    assert 0 <= row["likelihood"] <= 1
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_needle_in_words(long_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "needle", long_model, "--lengths", "500", "--depths", "0,50"]) == 0
    out = capsys.readouterr().out
    for words in ("of 2", "plain: there is no chat template", "by length and depth", "50%", "500"):
        assert words in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lengths", "4k"], "--lengths '4k' is not a list of numbers"),
        (["--depths", "10,10"], "--depths '10,10' must hold whole numbers, each once"),
        (["--depths", "120"], "a depth of 1.2 lies outside"),
        (["--lengths", "2000"], "the context ends at 1024"),
        (["--trials", "0"], "0 trials"),
        (["--png", "absent/map.png"], "there is no folder absent"),
        (["--out", "absent/rows.jsonl"], "there is no folder absent"),
    ],
)
def test_mistakes_of_needle(
    options: list[str], words: str, long_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "needle", long_model, "--lengths", "500", *options]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
