"""The transformers benchmark: it measures what it says, and the two attentions agree."""

from __future__ import annotations

import pytest

from flexdecode.benchmark.hosted import Hosted, measure


def test_a_row_tells_both_times_and_that_they_agree() -> None:
    row = measure("smollm2-135m", 70, 2)
    assert row["context"] == 70
    assert row["step_ms"] > 0
    assert row["sdpa_step_ms"] > 0
    assert row["difference"] < 0.05
    assert row["threads"] >= 1


def test_steps_leave_the_context_where_it_was() -> None:
    hosted = Hosted("smollm2-135m", 10)
    hosted.use("flexdecode")
    first = hosted.step()
    hosted.use("flexdecode")
    assert (hosted.step() - first).abs().max() == 0


def test_bad_input_is_one_line() -> None:
    with pytest.raises(ValueError, match="shape 'nope' is not known"):
        Hosted("nope", 10)
    with pytest.raises(ValueError, match="9000 tokens do not fit smollm2-135m, which ends at 8192"):
        Hosted("smollm2-135m", 9000)
