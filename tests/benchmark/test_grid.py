"""The grid: rates of a batch, memory without the benchmark's own, and cells that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexdecode import LLM
from flexdecode.benchmark import grid
from flexdecode.benchmark.ceilings import copies
from flexdecode.benchmark.grid import bench
from tests.benchmark.columns import EVERY_ROW, FACTS, FLOOR, spread
from tests.benchmark.conftest import READ, STEP, Clock
from tests.checkpoints import tiny

pytestmark = pytest.mark.usefixtures("small_reads")
OWN = {"batch", "prefill_length", "decode_length", "prefill_repetitions", "prefill_tokens_per_second"}
OWN |= {"decode_tokens_per_second", "held_bytes", "peak_bytes", *spread("prefill_"), *spread("step_")}


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    tiny(tmp_path)
    return LLM(tmp_path)


def test_rows_are_complete_and_the_engine_left_as_it_was(llm: LLM) -> None:
    free = llm.engine.cache.free_tokens()
    rows = list(bench(llm, "m", [1, 2], [8, 16], 2))
    assert [(row["batch"], row["prefill_length"], row["decode_length"]) for row in rows] == [
        (1, 8, 8),
        (1, 16, 16),
        (2, 8, 8),
        (2, 16, 16),
    ]
    for row in rows:
        assert set(row) == EVERY_ROW | FACTS | FLOOR | OWN
        assert row["prefill_repetitions"] == 2
    assert rows[0]["repetitions"] == 8 - 1 - 1, "every step but the prefill's and the one that warms up"
    assert llm.engine.cache.free_tokens() == free
    assert not llm.engine.busy


def test_rates_are_of_the_whole_batch(llm: LLM, clock: Clock) -> None:
    clock.drive(llm)
    (row,) = bench(llm, "m", [4], [16], 3)
    assert row["prefill_ms"] == STEP * 1e3  # 4 · 16 tokens are one step
    assert row["prefill_tokens_per_second"] == 4 * 16 / STEP
    assert row["decode_tokens_per_second"] == 4 / STEP
    assert row["fraction_of_floor"] == pytest.approx(READ / STEP, rel=1e-4)
    assert row["kv_read_bytes"] == 4 * llm.explain(16 + 8).kv_bytes


def test_memory_is_less_what_the_benchmark_holds(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "held_bytes", lambda device: 5 << 30)
    monkeypatch.setattr(grid, "peak_bytes", lambda device: 6 << 30)
    (row,) = bench(llm, "m", [1], [16], 1)
    nbytes = (row["weights_read_bytes"] + row["kv_read_bytes"]) // 8 * 8
    own = nbytes * copies(nbytes)
    assert (row["held_bytes"], row["peak_bytes"]) == ((5 << 30) - own, (6 << 30) - own)
    monkeypatch.setattr(grid, "peak_bytes", lambda device: None)
    (row,) = bench(llm, "m", [1], [16], 1)
    assert row["peak_bytes"] is None


def test_a_cell_that_does_not_fit_is_a_failed_row_and_others_are_measured(llm: LLM) -> None:
    good, bad = bench(llm, "m", [1, 100], [16], 1)
    assert good["step_ms"] > 0
    assert "100 sequences of 16 + 1 tokens need" in bad["failure"]
    assert set(bad) >= EVERY_ROW | FACTS | {"batch", "prefill_length", "decode_length"}


def test_prompts_that_take_longer_than_answers_are_a_failed_row(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid.Session, "steps_left", property(lambda self: 1))
    (row,) = bench(llm, "m", [8], [8], 1)
    assert "8 prompts take so many steps" in row["failure"]
    assert not llm.engine.busy


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([16, 129], "--lengths 129, a prompt and an answer of that length, needs a context of 258 tokens"),
        ([3, 16], "--lengths 3: decoding is timed from answers of 4"),
    ],
)
def test_wrong_lengths_are_refused_before_any_work(llm: LLM, lengths: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        next(bench(llm, "m", [1], lengths, 1))
