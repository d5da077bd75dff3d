"""The engine's benchmark: what each row compares, by a clock that the works drive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flexdecode import LLM
from flexdecode.benchmark.engine import Load, bench
from flexdecode.generation.engine import Engine
from flexdecode.generation.runner import Runner
from tests.benchmark.columns import EVERY_ROW, FACTS, spread
from tests.benchmark.conftest import Clock
from tests.checkpoints import tiny

LOAD = Load(running=3, prompt=20, answer=30, known=150)
COMPARED = {"work", "beside", "beside_ms", "times", *spread()}


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    tiny(tmp_path, tokenizer=False)
    return LLM(tmp_path)


def rows(llm: LLM, load: Load = LOAD) -> dict[str, Any]:
    return {row["work"]: row for row in bench(llm, "m", load, 2)}


def test_rows_are_complete_and_the_model_s_own_engine_is_left_alone(llm: LLM) -> None:
    found = rows(llm)
    assert len(found) == 4
    for row in found.values():
        assert set(row) == EVERY_ROW | FACTS | COMPARED
    assert llm.engine.computed_tokens == 0


def test_a_step_that_takes_as_long_for_many(llm: LLM, clock: Clock) -> None:
    """Then three tokens take as long as one; a prompt of 20 tokens takes one step with its neighbours."""
    clock.slow(Engine, "step", lambda n: 2.0)
    clock.slow(Runner, "compute", lambda n: 0.5)  # of the loop, and of every step
    found = rows(llm)
    assert found["a token, 3 running"]["times"] == pytest.approx(3)
    assert found["a token, 3 running"]["ms"] == pytest.approx(2500 / 3)
    assert found["3 x (20 + 30) tokens"]["ms"] == pytest.approx(30 * 2500)
    assert found["3 x (20 + 30) tokens"]["beside_ms"] == pytest.approx(30 * 2500)
    assert found["a step, one running"]["times"] == pytest.approx(0.5 / 2.5)


def test_of_a_known_prompt_only_the_rest_is_computed(llm: LLM, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two whole pages of 64 tokens are found, and 38 of 166 tokens are new."""
    compute = Runner.compute

    def slow(self: Runner, ids: Any, *rest: Any) -> Any:
        clock.now += len(ids)
        return compute(self, ids, *rest)

    monkeypatch.setattr(Runner, "compute", slow)
    row = rows(llm)["first token, 150 known and 16 new"]
    assert (row["beside_ms"], row["ms"]) == (150e3, 38e3)
    assert row["times"] == 150 / 38


def test_guesses_are_compared_where_there_is_a_tokenizer(tmp_path: Path) -> None:
    tiny(tmp_path, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}", max_position_embeddings=2048)
    llm = LLM(tmp_path)
    found = rows(llm, Load(running=1, prompt=8, answer=4, known=8))
    assert [row["beside"] for row in found.values()][-2:] == ["copying, not looked up", "telling, not looked up"]


def test_answers_too_short_to_run_together_are_a_failed_row(llm: LLM) -> None:
    chunk = llm.engine.config.prefill_chunk
    long = Load(running=3, prompt=200, answer=2, known=8)
    assert chunk < 600
    row = rows(llm, long)["together"]
    assert "--output 2 ends before the last of 3 prompts" in row["failure"]
