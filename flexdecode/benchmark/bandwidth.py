"""What the memory gives: the rate at which this process, with its threads, reads bytes that no cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch


class Reader:
    """Reads a buffer of `nbytes` from end to end; the ceiling of whatever must read as many."""

    def __init__(self, nbytes: int) -> None:
        self._words = torch.ones(max(1, nbytes // 8), dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        return self._words.nbytes

    def __call__(self) -> None:
        self._words.sum()


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call, the device's work included."""
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def interleaved(repetitions: int, *works: Callable[[], object]) -> list[list[float]]:
    """Seconds of each of `works`, run in turn so that all see the same machine, after one round of warming up."""
    for work in works:
        work()
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repetitions):
        for own, work in zip(times, works, strict=True):
            own.append(seconds(work))
    return times


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """Median of the ratios of neighbours in time: the machine's drift cancels."""
    return median(a / b for a, b in zip(numerator, denominator, strict=True))
