"""Errors of means: by hand, and against what is known of made-up data."""

from __future__ import annotations

import math

import pytest
import torch

from flexdecode.evaluation.spread import block_length, mean_and_error


def test_by_hand() -> None:
    # Five values in blocks of three and two: deviations from the mean 3 sum to -3 and 3.
    mean, error = mean_and_error(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert block_length(5) == 3
    assert mean == 3.0
    assert error == pytest.approx(math.sqrt(2 * (9 + 9)) / 5)


@pytest.mark.parametrize(("count", "length"), [(1, 1), (2, 2), (4, 2), (5, 3), (9, 3), (10, 4), (10_000, 100)])
def test_blocks_are_as_long_as_they_are_many(count: int, length: int) -> None:
    assert block_length(count) == length


def test_no_second_block_no_error() -> None:
    assert mean_and_error(torch.tensor([7.0, 9.0])) == (8.0, None)
    assert mean_and_error(torch.tensor([7.0])) == (7.0, None)


def test_no_variation_no_error() -> None:
    assert mean_and_error(torch.full((100,), 3.0)) == (3.0, 0.0)


@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_neighbours_that_go_together(rho: float) -> None:
    """x[t] = rho x[t-1] + noise: the error of the mean is 1 / (1 - rho) / sqrt(N), for rho = 0.8 three times
    what independent values of that spread would have."""
    generator, count = torch.Generator().manual_seed(3), 40_000
    noise = torch.randn(count, generator=generator, dtype=torch.float64)
    x, values = 0.0, []
    for step in noise.tolist():
        x = rho * x + step
        values.append(x)
    _, error = mean_and_error(torch.tensor(values, dtype=torch.float64))
    assert error == pytest.approx(1 / (1 - rho) / math.sqrt(count), rel=0.2)


def test_sums_are_fp64() -> None:
    values = torch.cat([torch.tensor([2.0**25]), torch.ones(99)])
    assert mean_and_error(values)[0] == (2**25 + 99) / 100
