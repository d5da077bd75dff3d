"""The decode benchmark: what is timed at which length, backends in turn, and failures that are rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexdecode import LLM
from flexdecode.attention.backends.sdpa import Sdpa
from flexdecode.benchmark import decode
from flexdecode.benchmark.decode import Plan, bench
from tests.benchmark.columns import EVERY_ROW, FACTS, FLOOR, spread
from tests.benchmark.conftest import READ, STEP, Clock
from tests.checkpoints import tiny

pytestmark = pytest.mark.usefixtures("small_reads")
OWN = {"backend", "context", "batch", "fill", "in_turn", "tokens_per_second", "prefill_seconds", *spread()}
WARM_UP = 3


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], LLM]:
    tiny(tmp_path)
    return lambda name: LLM(tmp_path, attention=name)


@pytest.mark.parametrize("fill", ["prefill", "random"])
@pytest.mark.parametrize("together", [True, False])
def test_rows_are_complete(
    load: Callable[[str], LLM], fill: Any, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not together:
        monkeypatch.setattr(decode, "available_bytes", lambda device: 0)
    rows = list(bench(Plan("m", ("sdpa", "cpu"), (50, 60), 4, fill), load))
    places = [(row["context"], row["backend"]) for row in rows]
    assert sorted(places) == [(50, "cpu"), (50, "sdpa"), (60, "cpu"), (60, "sdpa")]
    for row in rows:
        other = {"sdpa": "times_cpu", "cpu": "times_sdpa"}[row["backend"]]
        assert set(row) == EVERY_ROW | FACTS | FLOOR | OWN | ({other} if together else set())
        assert (row["benchmark"], row["fill"], row["in_turn"]) == ("decode", fill, together)
        assert (row["attention"], row["warm_up"], row["repetitions"]) == (row["backend"], WARM_UP, 4)
        assert (row["prefill_seconds"] is None) == (fill == "random")


def test_a_length_is_where_the_last_timed_step_ends(
    load: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, lengths = load("cpu"), []
    step = llm.engine.step

    def spy() -> Any:
        advanced = step()
        lengths.append(advanced[0].length)
        return advanced

    monkeypatch.setattr(llm.engine, "step", spy)
    (row,) = bench(Plan("m", ("cpu",), (100,), 5), lambda name: llm)
    assert lengths[-1] == 100
    assert lengths == list(range(100 - 5 - WARM_UP, 101)), "the prefill, the steps that warm up, the timed ones"
    assert not llm.engine.busy
    # Those five see 95 … 99 keys.
    assert row["kv_read_bytes"] == llm.explain(97).kv_bytes


def test_a_short_context_has_fewer_steps(load: Callable[[str], LLM]) -> None:
    (row,) = bench(Plan("m", ("cpu",), (8,), 20), load)
    assert row["repetitions"] == 3
    with pytest.raises(ValueError, match="--lengths 5: decoding is timed from 6 tokens on"):
        next(bench(Plan("m", ("cpu",), (5,), 20), load))


def test_figures_are_of_the_step_and_of_reading_in_the_same_rounds(load: Callable[[str], LLM], clock: Clock) -> None:
    llm = load("cpu")
    clock.drive(llm, lambda n: 40.0 if n == 0 else STEP)
    (row,) = bench(Plan("m", ("cpu",), (100,), 5), lambda name: llm)
    assert row["prefill_seconds"] == 40.0
    assert (row["ms"], row["ms_q1"], row["ms_max"]) == (STEP * 1e3,) * 3
    assert row["tokens_per_second"] == 1 / STEP
    nbytes = row["weights_read_bytes"] + row["kv_read_bytes"]
    assert row["read_gb_per_s"] == pytest.approx(nbytes // 8 * 8 / READ / 1e9)
    assert row["fraction_of_floor"] == pytest.approx(READ / STEP, rel=1e-4)
    assert row["floor_steps_per_second"] == pytest.approx(1 / READ, rel=1e-4)


def test_backends_take_turns_and_are_compared_within_rounds(load: Callable[[str], LLM], clock: Clock) -> None:
    """A machine that slows down from round to round changes both and not their ratio."""
    models = {name: load(name) for name in ("sdpa", "cpu")}
    clock.drive(models["cpu"], lambda n: 2.0 + n)
    clock.slow(models["sdpa"].engine, "step", lambda n: 3 * (2.0 + n))
    slow, quick = bench(Plan("m", ("sdpa", "cpu"), (100,), 5), models.__getitem__)
    assert quick["times_sdpa"] == pytest.approx(3.0)
    assert slow["times_cpu"] == pytest.approx(1 / 3)


def test_a_backend_that_fails_does_not_keep_others_from_being_measured(
    load: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def breaks(self: Sdpa, call: Any) -> Any:
        calls.append(call)
        if len(calls) > 4 * (1 + WARM_UP + 2):  # in the third timed step
            raise RuntimeError("broken")
        return run(self, call)

    run = Sdpa.run
    monkeypatch.setattr(Sdpa, "run", breaks)
    bad, good = bench(Plan("m", ("sdpa", "cpu"), (50,), 5), load)
    assert (bad["backend"], bad["failure"]) == ("sdpa", "RuntimeError: broken")
    assert set(bad) >= EVERY_ROW | FACTS | {"context", "backend"}
    assert "ms" not in bad
    assert good["ms"] > 0
    assert "times_sdpa" not in good


def test_what_fails_for_all_is_a_failed_row_of_each(
    load: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    floors = iter([RuntimeError("no room for what is read"), None])

    def one_fails(*arguments: Any) -> Any:
        problem = next(floors)
        if problem is not None:
            raise problem
        return make(*arguments)

    make = decode.Floor
    monkeypatch.setattr(decode, "Floor", one_fails)
    llms = {name: load(name) for name in ("sdpa", "cpu")}
    rows = list(bench(Plan("m", ("sdpa", "cpu"), (50, 60), 3), llms.__getitem__))
    assert [(row["context"], "failure" in row) for row in rows] == [(50, True), (50, True), (60, False), (60, False)]
    assert not any(llm.engine.busy for llm in llms.values())


def test_a_model_that_cannot_be_made_is_failed_rows_unless_none_can(load: Callable[[str], LLM]) -> None:
    def some(name: str) -> LLM:
        if name == "flex":
            raise ValueError("no compiler")
        return load(name)

    rows = list(bench(Plan("m", ("flex", "cpu"), (50, 60), 3), some))
    assert [(row["backend"], row.get("failure")) for row in rows] == [
        ("cpu", None),
        ("cpu", None),
        ("flex", "ValueError: no compiler"),
        ("flex", "ValueError: no compiler"),
    ]
    for names in (("flex",), ("flex", "sdpa")):
        with pytest.raises(ValueError, match="no compiler"):
            next(bench(Plan("m", names, (50,), 3), lambda name: some("flex")))


def test_what_cannot_be_is_refused_before_a_model_is_made() -> None:
    def never(name: str) -> LLM:
        raise AssertionError

    with pytest.raises(ValueError, match="attention backend 'fast' is not known"):
        next(bench(Plan("m", ("cpu", "fast"), (50,), 3), never))


def test_a_context_that_ends_too_soon_is_refused(load: Callable[[str], LLM]) -> None:
    assert next(bench(Plan("m", ("cpu",), (256,), 3), load))["context"] == 256
    with pytest.raises(ValueError, match="--lengths 257 needs a context of 257 tokens, and it ends at 256"):
        next(bench(Plan("m", ("cpu",), (100, 257), 3), load))


def test_models_are_loaded_one_after_the_other_where_memory_is_short(
    load: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[str] = []

    class Counted(LLM):
        def __init__(self, folder: Path, name: str) -> None:
            super().__init__(folder, attention=name)
            self.name = name
            alive.append(name)

        def __del__(self) -> None:
            alive.remove(self.name)

    folder = load("cpu").source.path
    seen = []
    monkeypatch.setattr(decode, "available_bytes", lambda device: 0)
    for row in bench(Plan("m", ("sdpa", "cpu"), (50,), 3), lambda name: Counted(folder, name)):
        seen.append((row["backend"], list(alive)))
    assert seen == [("sdpa", ["sdpa"]), ("cpu", ["cpu"])]
