"""A clock that stands still unless told otherwise, so that a figure can be asserted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from flexdecode import LLM
from flexdecode.benchmark import ceilings, rounds
from flexdecode.benchmark.rounds import Times, Work
from flexdecode.generation import explain

STEP, READ, PRODUCT = 2.0, 0.5, 0.25  # seconds


class Clock:
    """Time as the works make it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self._monkeypatch = monkeypatch

    def perf_counter(self) -> float:
        return self.now

    def work(self, name: str, seconds: float) -> Work:
        def call() -> None:
            self.now += seconds
            self.log.append(name)

        def before() -> None:
            self.now += 1000.0

        return Work(call, before)

    def slow(self, target: Any, name: str, seconds: Callable[[int], float]) -> None:
        """Let the n-th call of a function take so long, whatever it takes."""
        call, counts = getattr(target, name), iter(range(1 << 30))

        def slower(*arguments: Any) -> Any:
            self.now += seconds(next(counts))
            return call(*arguments)

        self._monkeypatch.setattr(target, name, slower)

    def drive(self, llm: LLM, step: Callable[[int], float] = lambda n: STEP) -> None:
        """Every step of the engine takes STEP seconds or as told, every read READ, every product PRODUCT."""
        self.slow(llm.engine, "step", step)
        self.slow(ceilings.Reader, "__call__", lambda n: READ)
        self.slow(ceilings.Gemm, "__call__", lambda n: PRODUCT)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(rounds, "time", clock)
    return clock


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that need not outgrow a cache: no rate is asserted."""
    monkeypatch.setattr(ceilings, "_COLD_BYTES", 1 << 20)
    monkeypatch.setattr(explain, "_LEAST_READ", 1 << 20)


@pytest.fixture
def one_second_each(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Every work runs once, and takes as long as this says, or one second."""
    seconds: dict[str, float] = {}

    def run(works: Mapping[str, Work], repetitions: int, most_seconds: float | None = None) -> Times:
        for work in works.values():
            work.seconds()
        return Times({name: dict.fromkeys(range(repetitions), seconds.get(name, 1.0)) for name in works})

    monkeypatch.setattr(rounds, "run", run)
    return seconds
