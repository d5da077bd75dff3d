"""Rows of cases: threads are pinned for each and restored, and what fails or does not fit is a row that says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flexdecode.benchmark import rows
from flexdecode.benchmark.rows import each


@dataclass(frozen=True)
class Case:
    name: str
    nbytes: int = 0

    def columns(self) -> dict[str, Any]:
        return {"section": self.name}


def measured(case: Case) -> dict[str, Any]:
    if case.name == "wrong":
        raise ValueError("cannot serve")
    return {"threads": torch.get_num_threads()}


def test_threads_are_pinned_by_group_and_restored() -> None:
    before = torch.get_num_threads()
    found = each([Case("a"), Case("b")], [2, 1], measured, lambda case: 0)
    assert next(found)["threads"] == 2
    torch.set_num_threads(3)  # whatever the consumer does between rows
    assert [(row["section"], row["threads"]) for row in found] == [("b", 2), ("a", 1), ("b", 1)]
    assert torch.get_num_threads() == before
    found = each([Case("a")], [before + 1], measured, lambda case: 0)
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert torch.get_num_threads() == before


def test_an_error_is_a_failure_of_its_row() -> None:
    bad, good = each([Case("wrong"), Case("right")], [1], measured, lambda case: 0)
    assert bad["failure"] == "ValueError: cannot serve"
    assert {"benchmark", "section", "threads", "cpu", "commit", "repetitions"} <= set(bad)
    assert "failure" not in good


def test_what_does_not_fit_is_skipped_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "available_bytes", lambda device: 1 << 29)
    large, small = each([Case("a", 3 << 29), Case("b", 1 << 29)], [1], measured, lambda case: case.nbytes)
    assert large["skipped"] == "needs about 1.5 GiB of memory, 0.5 GiB are available"
    assert small["threads"] == 1
