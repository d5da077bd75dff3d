"""What a decode step costs by the number of its rows, from steps that were timed.

Knows neither requests nor models; one object serves an engine. Costs are compared with one another, so the unit does
not matter as long as it is always the same.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field

_KEPT = 9  # observations of one number of rows, of which the median counts
_TRUSTED = 2  # that many are needed: the first step of a shape may compile, allocate or meet a busy machine
_FORGOTTEN = 2048  # observed steps after which a number of rows that did not come again is to be measured anew
_BASE_FORGOTTEN = 256  # the same for the fewest rows: with them all others are compared, and nothing corrects them


@dataclass
class _Seen:
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    typical: float = 0.0
    step: int = 0


class StepCost:
    """Seconds of a step of so many rows.

    Numbers of rows that were not seen are estimated from the nearest that were, at the least they can cost: no less
    than fewer rows, and no less a row than more rows. Being wrong that way is corrected by the step that is tried for
    it; the other way, it would never be tried.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}  # in the order of their last observation
        self._known: list[int] = []  # rows with enough observations, rising
        self._steps = 0

    def observe(self, rows: int, seconds: float) -> None:
        """A step computed `rows` tokens, one sequence or many, and took so long with all that belongs to it, proposing
        included. Steps with a part of a prompt in them are of another kind and do not belong here. A clock that did
        not move says nothing."""
        assert rows >= 1, f"a step of {rows} rows"
        if not seconds > 0.0:
            return
        self._steps += 1
        seen = self._seen.pop(rows, None) or _Seen()
        self._seen[rows] = seen
        seen.recent.append(seconds)
        seen.typical = statistics.median_low(seen.recent)
        seen.step = self._steps
        if len(seen.recent) == _TRUSTED:
            insort(self._known, rows)
        while self._age(oldest := next(iter(self._seen))) >= _FORGOTTEN:
            self._forget(oldest)
        while self._known and self._age(self._known[0]) >= _BASE_FORGOTTEN:
            self._forget(self._known[0])

    def _age(self, rows: int) -> int:
        return self._steps - self._seen[rows].step

    def _forget(self, rows: int) -> None:
        if len(self._seen.pop(rows).recent) >= _TRUSTED:
            self._known.remove(rows)

    def __call__(self, rows: int) -> float | None:
        """Seconds of a step of `rows`; None where nothing seen says enough: no step of that many rows or fewer, or
        none of at least half as many."""
        place = bisect_right(self._known, rows)
        if place == 0:
            return None
        fewer = self._known[place - 1]
        least = self._seen[fewer].typical
        if place == len(self._known):
            return least if rows <= 2 * fewer else None
        more = self._known[place]
        above = self._seen[more].typical
        least = min(least, above)  # a busy moment may have made fewer rows look dearer than more
        return least if fewer == rows else max(least, above * rows / more)
