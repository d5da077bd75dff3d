"""Grids of test cases that cover pairs of values instead of all combinations."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any


def pairwise(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """Cases that hold every pair of values of any two axes at least once, the same every time."""
    names = list(axes)
    missing = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }
    dice, cases = random.Random(0), []
    while missing:
        a, i, b, j = min(missing)
        best: dict[str, int] = {}
        most = -1
        for _ in range(20):
            case = {name: dice.randrange(len(axes[name])) for name in names} | {a: i, b: j}
            new = sum((p, case[p], q, case[q]) in missing for p, q in itertools.combinations(names, 2))
            if new > most:
                best, most = case, new
        missing -= {(p, best[p], q, best[q]) for p, q in itertools.combinations(names, 2)}
        cases.append({name: axes[name][best[name]] for name in names})
    return cases


def by_name(case: Any) -> str:
    """A test id out of a case's values."""
    if isinstance(case, dict):
        return "-".join(str(v).removeprefix("torch.") for v in case.values())
    return str(getattr(case, "name", case))
