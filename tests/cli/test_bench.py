"""`bench step`: what it prints, and what it refuses. No figure is asserted: speed belongs to the benchmark."""

from __future__ import annotations

import json

import pytest

from flexdecode.cli.main import main


def test_a_row_states_its_ceiling(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "step", "random:tiny@int4", "--context", "8", "--repetitions", "3", "--json"]
    assert main(argv) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["context"] == 8
    assert row["product_bytes"] > 0
    for key in ("step_ms", "products_ms", "read_gb_per_s", "fraction_of_products_alone", "tokens_per_second"):
        assert row[key] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--context", "0"], "--context 0"), (["--context", "100000000"], "the context ends at")],
)
def test_wrong_values_are_one_line(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "random:tiny", *options]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
