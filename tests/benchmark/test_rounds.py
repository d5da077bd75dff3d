"""Works are timed in turn, and compared within a round. The clock is a fake one that the works move on."""

from __future__ import annotations

import pytest

from flexdecode.benchmark import rounds
from flexdecode.benchmark.rounds import Times, Work, quartiles
from tests.benchmark.conftest import Clock


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


def test_a_work_may_ask_for_fewer_rounds(clock: Clock) -> None:
    few = Work(clock.work("f", 2.0).call, most=3)
    times = rounds.run({"ours": clock.work("o", 1.0), "few": few}, 9, warm_up=2)
    assert clock.log.count("o") == 9 + 2
    assert sorted(times.seconds["few"]) == [2, 5, 8]
    assert times.ratio("few", "ours") == 2.0


def test_quartiles_lie_between_neighbours() -> None:
    assert quartiles([7.0]) == (7.0, 7.0)
    assert quartiles([4.0, 1.0, 3.0, 2.0]) == (1.75, 3.25)
    spread = Times({"a": dict(enumerate([0.004, 0.001, 0.003, 0.002]))}).spread("a")
    expected = {"ms": 2.5, "ms_q1": 1.75, "ms_q3": 3.25, "ms_min": 1.0, "ms_max": 4.0}
    assert spread == pytest.approx(expected)


def test_ratios_pair_what_ran_in_the_same_round() -> None:
    drifting = Times({"a": {0: 1.0, 1: 10.0, 2: 100.0}, "b": {0: 2.0, 2: 200.0}, "c": {2: 50.0}})
    assert drifting.ratio("b", "a") == 2.0
    assert drifting.ratio_of_sums(["b", "c"], ["a", "c"]) == pytest.approx(250 / 150)
