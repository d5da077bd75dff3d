"""`bench`: what it prints, and what it refuses. No figure is asserted: speed belongs to the benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flexdecode.cli.main import main


def test_a_row_states_its_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "step", "random:tiny@int4", "--context", "8", "--repetitions", "3", "--json"]
    assert main(argv) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["context"] == 8
    assert row["product_bytes"] > 0
    for key in (
        "ms",
        "products_ms",
        "fraction_of_floor",
        "read_gb_per_s",
        "fraction_of_products_alone",
        "tokens_per_second",
    ):
        assert row[key] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--context", "0"], "--context 0"), (["--context", "100000000"], "ends at")],
)
def test_wrong_values_are_one_line(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "random:tiny", *options]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


SMALL = ["bench", "kernels", "--lengths", "128", "--head-dims", "64", "--groups", "2", "--repetitions", "1"]
PRODUCTS = [*SMALL, "--shapes", "64x128", "--rows", "1", "--group-sizes", "32", "--threads", "1"]


def test_kernels_write_the_same_rows_to_stdout_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text("an older run\n")
    assert main([*SMALL, "--only", "verify,plan", "--threads", "1", "--json", "--out", str(out)]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["section"] for row in printed] == ["plan"] * 3 + ["verify"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_kernels_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    assert main([*SMALL, "--only", "verify", "--threads", "2,1,2"]) == 0
    shown = capsys.readouterr().out
    assert [line.split(",")[1] for line in shown.splitlines() if line.startswith("verify")] == [
        " 2 threads",
        " 1 thread",
    ]
    assert torch.get_num_threads() == before


def test_products_stand_below_attention(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PRODUCTS, "--only", "dense,int4,verify", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["section"] for row in found] == ["verify"] * 2 + ["int4", "dense"]
    assert {row["benchmark"] for row in found} == {"kernels"}
    assert main([*PRODUCTS, "--only", "int8-weights"]) == 0
    assert "64x128" in capsys.readouterr().out


def test_a_wrong_kernel_ends_in_1_after_all_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexdecode.benchmark.kernels.Cpu.run", lambda self, call: (torch.zeros_like(call.q_THD), None))
    out = tmp_path / "rows.jsonl"
    assert main([*SMALL, "--only", "verify", "--threads", "1", "--out", str(out)]) == 1
    told = capsys.readouterr()
    assert told.out.count("FAILED: the kernel is off by") == 2
    assert "2 of 2 rows failed" in told.err
    assert len(out.read_text().splitlines()) == 2


def test_a_run_that_breaks_off_leaves_its_rows_beside_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_row(*_: object) -> Iterator[dict[str, object]]:
        yield {"failure": "no", "error": None}
        raise KeyboardInterrupt

    monkeypatch.setattr("flexdecode.benchmark.kernels.bench", one_row)
    out = tmp_path / "rows.jsonl"
    out.write_text("an older run\n")
    assert main([*SMALL, "--json", "--out", str(out)]) == 130
    assert out.read_text() == "an older run\n"
    assert len((tmp_path / "rows.jsonl.part").read_text().splitlines()) == 1
    assert "measured so far (1) are in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "decode,nonsense"], "'nonsense' is not known"),
        (["--repetitions", "0"], "--repetitions 0"),
        (["--threads", "all,0"], "--threads"),
        (["--threads", "some"], "--threads 'some'"),
        (["--lengths", "4k"], "--lengths '4k'"),
        (["--shapes", "4096"], "--shapes '4096' is not a list of outputs x inputs"),
        (["--shapes", "64x128,0x64"], "--shapes '64x128,0x64'"),
        (["--group-sizes", "100"], "--group-sizes 100 does not divide"),
        (["--out", "absent/rows.jsonl"], "absent/rows.jsonl"),
    ],
)
def test_wrong_values_of_kernels(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", *options]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
