"""Times of works that run in turn, so that all see the same machine. Knows nothing of what the works do.

Machines drift: what is compared is compared within a round, and the figure is the median of the rounds' ratios. Each
second round runs backwards, so that no work always follows the same neighbour.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

import torch

WARM_UP = 1  # calls of each work before the first that counts
_LEAST = 3  # rounds that even a slow work takes part in


@dataclass(frozen=True)
class Work:
    """`call` is timed; `before` makes things ready for it, and is not. `most` is how many rounds it takes part in at
    most, spread evenly over all. `calls` of it follow each other, and their mean is the time: what takes less than a
    millisecond and is always one of many would else be timed as it begins."""

    call: Callable[[], object]
    before: Callable[[], object] | None = None
    most: int | None = None
    calls: int = 1

    def seconds(self) -> float:
        """Wall time of one call, the device's work included."""
        if self.before is not None:
            self.before()
        start = time.perf_counter()
        for _ in range(self.calls):
            self.call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / self.calls


@dataclass(frozen=True)
class Times:
    """Seconds by work and round."""

    seconds: Mapping[str, Mapping[int, float]]

    def of(self, name: str) -> list[float]:
        return list(self.seconds[name].values())

    def ms(self, name: str) -> float:
        """The median in milliseconds."""
        return median(self.of(name)) * 1e3

    def spread(self, name: str) -> dict[str, float]:
        """Median, quartiles and extremes in milliseconds."""
        seconds = self.of(name)
        low, high = quartiles(seconds)
        found = {"ms": self.ms(name), "ms_q1": low * 1e3, "ms_q3": high * 1e3}
        return found | {"ms_min": min(seconds) * 1e3, "ms_max": max(seconds) * 1e3}

    def ratio(self, numerator: str, denominator: str) -> float:
        return self.ratio_of_sums([numerator], [denominator])

    def ratio_of_sums(self, numerator: list[str], denominator: list[str]) -> float:
        """Median over the rounds in which all of these works ran."""
        every = [self.seconds[name] for name in (*numerator, *denominator)]
        common = set(every[0]).intersection(*every[1:])
        return median(
            sum(self.seconds[name][i] for name in numerator) / sum(self.seconds[name][i] for name in denominator)
            for i in common
        )


def quartiles(values: list[float]) -> tuple[float, float]:
    """The first and the third, between neighbours where they fall there; of one value that value."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = quantiles(values, n=4, method="inclusive")
    return first, third


def run(
    works: Mapping[str, Work], repetitions: int, most_seconds: float | None = None, warm_up: int = WARM_UP
) -> Times:
    """Time `works` in rounds, as many as the first of them takes part in: `repetitions`, after `warm_up` calls of each.

    With `most_seconds` a work that would take longer in all takes part in fewer rounds, spread evenly, and at least 3.
    """
    warm = {name: [work.seconds() for _ in range(warm_up)][-1] for name, work in works.items()}
    counts = {name: _rounds(repetitions, most_seconds, seconds) for name, seconds in warm.items()}
    total = next(iter(counts.values()))
    counts = {name: min(count, total, works[name].most or total) for name, count in counts.items()}
    seconds: dict[str, dict[int, float]] = {name: {} for name in works}
    for i in range(total):
        taking_part = [name for name, count in counts.items() if (i + 1) * count // total > i * count // total]
        for name in taking_part if i % 2 == 0 else reversed(taking_part):
            seconds[name][i] = works[name].seconds()
    return Times(seconds)


def _rounds(repetitions: int, most_seconds: float | None, once: float) -> int:
    if most_seconds is None or once * repetitions <= most_seconds:
        return repetitions
    return min(repetitions, max(_LEAST, int(most_seconds / once)))
