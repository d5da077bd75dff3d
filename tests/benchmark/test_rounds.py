"""Works are timed in turn, and compared within a round. The clock is a fake one that the works move on."""

from __future__ import annotations

import pytest

from flexdecode.benchmark import rounds
from flexdecode.benchmark.rounds import Times, Work


class Clock:
    """Time as the works make it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    def work(self, name: str, seconds: float) -> Work:
        def call() -> None:
            self.now += seconds
            self.log.append(name)

        def before() -> None:
            self.now += 1000.0

        return Work(call, before)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rounds, "time", clock)
    return clock


def test_works_take_turns_and_every_second_round_runs_backwards(clock: Clock) -> None:
    times = rounds.run({"a": clock.work("a", 2.0), "b": clock.work("b", 6.0)}, 3)
    assert "".join(clock.log) == "ab" + "ab" + "ba" + "ab"
    assert times.of("a") == [2.0] * 3
    assert times.ms("b") == 6000.0
    assert times.ratio("b", "a") == 3.0


def test_a_slow_work_takes_part_in_rounds_that_are_spread_out(clock: Clock) -> None:
    times = rounds.run({"ours": clock.work("o", 1.0), "slow": clock.work("s", 9.0)}, 12, most_seconds=36.0)
    assert sorted(times.seconds["ours"]) == list(range(12))
    assert sorted(times.seconds["slow"]) == [2, 5, 8, 11]
    assert times.ratio("slow", "ours") == 9.0


def test_the_first_work_sets_the_rounds_and_three_are_the_least(clock: Clock) -> None:
    times = rounds.run({"ours": clock.work("o", 50.0), "quick": clock.work("q", 1.0)}, 20, most_seconds=10.0)
    assert [len(times.of(name)) for name in ("ours", "quick")] == [3, 3]


def test_ratios_pair_what_ran_in_the_same_round() -> None:
    drifting = Times({"a": {0: 1.0, 1: 10.0, 2: 100.0}, "b": {0: 2.0, 2: 200.0}, "c": {2: 50.0}})
    assert drifting.ratio("b", "a") == 2.0
    assert drifting.ratio_of_sums(["b", "c"], ["a", "c"]) == pytest.approx(250 / 150)
