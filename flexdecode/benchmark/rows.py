"""Rows of results, case by case: each with its threads, and a row that says so where one failed or was skipped.

Knows neither what is measured nor how. A row with `failure` (an error, or a result beyond its tolerance) has no times,
nor has one with `skipped`, for which there is too little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch

from flexdecode.benchmark.provenance import provenance
from flexdecode.memory import available_bytes

Row = dict[str, Any]
FAILURES = (ValueError, RuntimeError, MemoryError)  # of one row, which do not keep the others from being measured


class Columns(Protocol):
    """A case: what tells its row from others."""

    def columns(self) -> Row: ...


C = TypeVar("C", bound=Columns)


def each(
    cases: Sequence[C], threads: Sequence[int], measured: Callable[[C], Row], needed: Callable[[C], int]
) -> Iterator[Row]:
    """A row for each number of threads and case, as it is measured; torch's threads are restored afterwards.

    `measured` gives the figures, their provenance included; `needed` says about how many bytes that takes.
    """
    before = torch.get_num_threads()
    try:
        for count in threads:
            for case in cases:
                torch.set_num_threads(count)
                yield {"benchmark": "kernels", **case.columns(), **_row(case, measured, needed(case))}
    finally:
        torch.set_num_threads(before)


def _row(case: C, measured: Callable[[C], Row], needed: int) -> Row:
    available = available_bytes(torch.device("cpu"))
    if needed > available:
        told = f"needs about {needed / 2**30:.1f} GiB of memory, {available / 2**30:.1f} GiB are available"
        return {"skipped": told, **provenance(0, 0)}
    try:
        return measured(case)
    except FAILURES as problem:
        return failure(problem)


def failure(problem: BaseException) -> Row:
    """What a row says that has no times."""
    return {"failure": f"{type(problem).__name__}: {problem}", **provenance(0, 0)}
