"""Costs of steps from observations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexdecode.generation.step_cost import StepCost


def measured(seconds: dict[int, float]) -> StepCost:
    cost = StepCost()
    for rows, value in seconds.items():
        cost.observe(rows, value)
        cost.observe(rows, value)
    return cost


def test_nothing_is_known_at_first() -> None:
    cost = StepCost()
    assert cost(1) is None
    cost.observe(1, 2.0)
    assert cost(1) is None, "one step may have been anything"
    cost.observe(1, 1.0)
    assert cost(1) == 1.0


def test_what_was_not_seen_is_estimated_at_the_least() -> None:
    cost = measured({2: 1.0, 12: 3.0})
    assert cost(1) is None
    assert [cost(rows) for rows in (2, 3, 4, 8, 12)] == [1.0, 1.0, 1.0, 2.0, 3.0]
    assert [cost(rows) for rows in (13, 24, 25)] == [3.0, 3.0, None], "no further than twice what was seen"


def test_a_moment_of_noise_does_not_count() -> None:
    cost = measured({1: 1.0, 4: 2.0})
    for value in (50.0, 2.0, 60.0):
        cost.observe(4, value)
    assert cost(4) == 2.0
    cost.observe(4, 0.0)
    assert cost(4) == 2.0, "a clock that did not move"


def test_fewer_rows_are_not_dearer_than_more() -> None:
    cost = measured({1: 1.0, 4: 9.0, 8: 2.0})
    assert [cost(rows) for rows in (1, 4, 6, 8)] == [1.0, 2.0, 2.0, 2.0]


def test_costs_follow_the_machine() -> None:
    cost = measured({1: 1.0})
    for _ in range(5):
        cost.observe(1, 3.0)
    assert cost(1) == 3.0


def test_what_does_not_come_again_is_forgotten() -> None:
    cost = measured({1: 1.0, 4: 2.0})
    cost.observe(8, 3.0)  # once only: forgotten as well
    for _ in range(3000):
        cost.observe(1, 1.0)
    assert [cost(rows) for rows in (1, 2, 4, 8)] == [1.0, 1.0, None, None]
    cost.observe(4, 5.0)
    cost.observe(8, 9.0)
    assert cost(4) is None, "it begins anew"


def test_the_fewest_rows_are_measured_again_sooner() -> None:
    cost = measured({1: 1.0, 2: 1.0, 4: 2.0})
    for _ in range(300):
        cost.observe(4, 2.0)
    assert [cost(rows) for rows in (1, 2, 4)] == [None, None, 2.0]


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0.001, 100.0)), min_size=1, max_size=200))
def test_bounds(observations: list[tuple[int, float]]) -> None:
    """An estimate lies within what was observed, and is there for every row count that was seen twice."""
    cost = StepCost()
    for rows, seconds in observations:
        cost.observe(rows, seconds)
    values = [seconds for _, seconds in observations]
    seen = [rows for rows, _ in observations]
    known = [rows for rows in set(seen) if seen.count(rows) > 1]
    for rows in range(1, 90):
        estimate = cost(rows)
        possible = any(other <= rows for other in known) and rows <= 2 * max(known)
        assert (estimate is not None) is possible
        assert estimate is None or min(values) <= estimate <= max(values)


def test_a_step_has_rows() -> None:
    with pytest.raises(AssertionError, match="0 rows"):
        StepCost().observe(0, 1.0)
