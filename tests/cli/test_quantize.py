"""`flexdecode quantize` as a user meets it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flexdecode.cli.main import main
from flexdecode.quantizer.layer import LayerQuantizer
from tests.checkpoints import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    d = tmp_path_factory.mktemp("model")
    tiny(d, dtype=torch.bfloat16, num_hidden_layers=2)
    return d


def run(*argv: str | Path) -> int:
    return main(["quantize", *map(str, argv)])


SMALL = ("--group-size", "32", "--samples", "3", "--length", "30")


def test_awq_by_default(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default text comes with a warning; the table has a row an input of a layer; a picture is drawn."""
    assert run(model, tmp_path / "out", *SMALL, "--png", tmp_path / "a.png", "-v") == 0
    printed = capsys.readouterr()
    assert "text like that of your use is better" in printed.err
    assert "90 tokens in 3 pieces (of " in printed.err
    assert "layer 2 of 2" in printed.err
    for word in ("plain rounding", "clipped", "gate_up", "matrices quantized"):
        assert word in printed.out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert main(["generate", str(tmp_path / "out"), "-p", "ab", "-n", "3", "--raw"]) == 0


def test_json(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, tmp_path / "out", "--method", "int8", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["options"]["method"] == "int8"
    assert len(told["matrices"]) == 14
    assert all(m["kind"] == "int8" and 0 < m["after"] < 0.02 and m["before"] is None for m in told["matrices"])


def test_dry_run_writes_nothing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, tmp_path / "out", "--group-size", "32", "--dry-run", "--json", "--skip", "k_proj") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["matrices_quantized"] == 12
    assert told["left"] == [{"matrices": "model.layers.*.self_attn.k_proj", "count": 2, "why": "--skip k_proj"}]
    assert told["peak_memory_bytes"] > told["peak_memory_added_bytes"] > told["saved_bytes"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_lines(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """B34. Long lines are cut and not dropped; ids and strings and blank lines mix."""
    lines = [json.dumps({"words": "x" * 200}), "", json.dumps("y" * 20), json.dumps([1, 2, 3])]
    (tmp_path / "a.jsonl").write_text("\r\n".join(lines))
    options = (*SMALL, "--samples", "100", "--data", tmp_path / "a.jsonl", "--column", "words")
    assert run(model, tmp_path / "out", *options) == 0
    assert "223 tokens in 9 pieces (all) from 3 documents" in capsys.readouterr().err


def test_stdin(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("some text of forty characters, more or less"))
    assert run(model, tmp_path / "out", *SMALL, "--data", "-") == 0
    assert "stdin: 43 tokens in 2 pieces (all) from 1 document" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--data", "absent.txt"], "absent.txt: cannot be read (No such file or directory)"),
        (["--data", "empty.txt"], "empty.txt: holds no text to calibrate on"),
        (["--data", "bad.jsonl"], "bad.jsonl: line 2 is not JSON"),
        (["--data", "a.txt", "--dataset", "b"], "--data and --dataset both name the calibration text"),
        (["--dataset", "wikitext"], "needs the datasets package, which is not installed: pip install datasets"),
        (["--method", "rtn", "--data", "a.txt"], "--method rtn reads no calibration text"),
        (["--method", "gptq"], "--method 'gptq' is not known"),
        (["--resume"], "there is no unfinished run to --resume"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--device", "cuda"], "sees no CUDA device; use cpu"),
        (["--png", "no/such.png"], "there is no folder no"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str],
    words: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n\r\n")
    (tmp_path / "bad.jsonl").write_text('"a"\n{\n')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "datasets" else object())
    assert run(model, tmp_path / "out", "--group-size", "32", *argv) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_an_existing_directory_is_left_alone(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    assert run(model, tmp_path / "out") == 1
    assert "exists already; give another name, or remove it" in capsys.readouterr().err
    assert run(model, tmp_path / "no" / "out") == 1
    assert "there is no folder" in capsys.readouterr().err


def test_random_weights_are_calibrated_on_random_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("random:tiny", tmp_path / "out", *SMALL) == 0
    assert "random token ids: 90 tokens" in capsys.readouterr().err
    assert run("random:tiny", tmp_path / "out2", *SMALL, "--data", __file__) == 1
    assert "give --data a .jsonl file of lists of ids" in capsys.readouterr().err


def test_an_interruption_says_how_to_go_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, count = LayerQuantizer.round, 0

    def interrupted(self: LayerQuantizer) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return layer(self)

    monkeypatch.setattr(LayerQuantizer, "round", interrupted)
    assert run(model, tmp_path / "out", *SMALL) == 130
    assert f"finished layers are kept in {tmp_path / 'out'}.unfinished; --resume goes on" in capsys.readouterr().err
    assert run(model, tmp_path / "out", *SMALL, "--resume", "--seed", "1") == 1
    assert "was begun with another calibration, options; ask for the same" in capsys.readouterr().err
    assert run(model, tmp_path / "out", *SMALL, "--resume") == 0
    assert main(["inspect", str(tmp_path / "out")]) == 0
