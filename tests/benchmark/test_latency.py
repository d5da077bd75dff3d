"""The latency benchmark: medians over whole answers, and rates that count what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexdecode import LLM
from flexdecode.benchmark.latency import Task, bench
from tests.benchmark.columns import EVERY_ROW, FACTS, FLOOR, spread
from tests.benchmark.conftest import READ, STEP, Clock
from tests.checkpoints import tiny

pytestmark = pytest.mark.usefixtures("small_reads")
OWN = {"batch", "prefill_length", "decode_length", "prefill_tokens_per_second", "decode_tokens_per_second"}
OWN |= {"tokens_per_second", "total_tokens_per_second", *spread("total_"), *spread("prefill_"), *spread("decode_")}


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    tiny(tmp_path)
    return LLM(tmp_path)


def test_a_row_is_complete_and_the_engine_left_as_it_was(llm: LLM) -> None:
    (row,) = bench(llm, "m", Task(2, 20, 5), 3)
    assert set(row) == EVERY_ROW | FACTS | FLOOR | OWN
    assert (row["repetitions"], row["warm_up"]) == (3, 1)
    assert (row["batch"], row["prefill_length"], row["decode_length"]) == (2, 20, 5)
    assert not llm.engine.busy


def test_every_rate_counts_what_it_says(llm: LLM, clock: Clock) -> None:
    clock.drive(llm)
    (row,) = bench(llm, "m", Task(2, 20, 6), 3)
    prefill, decode = STEP, 5 * STEP  # the first token comes with the prompt
    assert (row["prefill_ms"], row["decode_ms"]) == (prefill * 1e3, decode * 1e3)
    assert row["total_ms"] == (prefill + decode) * 1e3
    assert row["prefill_tokens_per_second"] == 2 * 20 / prefill
    assert row["decode_tokens_per_second"] == 2 * 5 / decode
    assert row["tokens_per_second"] == pytest.approx(2 * 6 / (prefill + decode))
    assert row["total_tokens_per_second"] == pytest.approx(2 * (20 + 6) / (prefill + decode))
    assert row["fraction_of_floor"] == pytest.approx(READ / STEP, rel=1e-4)
    assert row["kv_read_bytes"] == 2 * llm.explain(20 + 3).kv_bytes


def test_medians_are_of_whole_answers(llm: LLM, clock: Clock) -> None:
    """Of each answer's five steps, the warming one's left out: 5, then 50, 10 and 15 seconds."""
    pace = [1.0] * 5 + [10.0] * 5 + [2.0] * 5 + [3.0] * 5
    clock.drive(llm, pace.__getitem__)
    (row,) = bench(llm, "m", Task(1, 20, 5), 3)
    assert row["total_ms"] == 15e3
    assert (row["total_ms_q1"], row["total_ms_q3"], row["total_ms_max"]) == (12.5e3, 32.5e3, 50e3)
    assert row["decode_ms"] == 12e3


def test_what_does_not_fit_is_a_failed_row(llm: LLM) -> None:
    (row,) = bench(llm, "m", Task(100, 20, 5), 1)
    assert "100 sequences of 20 + 5 tokens" in row["failure"]


def test_wrong_values_are_refused_before_any_work(llm: LLM) -> None:
    with pytest.raises(ValueError, match="--output 1: the first token belongs to the prefill"):
        next(bench(llm, "m", Task(1, 20, 1), 1))
    with pytest.raises(ValueError, match="--input 250 and --output 7 needs a context of 257 tokens"):
        next(bench(llm, "m", Task(1, 250, 7), 1))
