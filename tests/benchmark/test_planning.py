"""A planner makes the plans that it says it times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexdecode.attention.masks import Mask, causal, mask, window
from flexdecode.attention.plan import AttentionPlan
from flexdecode.benchmark import planning
from flexdecode.benchmark.cases import Case, causal_in_python
from flexdecode.benchmark.planning import Planner
from flexdecode.benchmark.rounds import WARM_UP


@pytest.mark.parametrize("own", [causal(), causal() & window(100), mask(causal_in_python)])
@pytest.mark.parametrize("queries", [1, 4])
def test_a_sequence_grows_and_a_fresh_one_does_not(own: Mask, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[AttentionPlan] = []
    plan = planning.plan_attention

    def spy(*arguments: object, **options: object) -> AttentionPlan:
        made.append(plan(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(planning, "plan_attention", spy)
    case, repetitions = replace(Case("plan", 1000, 64, 4, kernel="plan"), mask=own, queries=queries), 5
    planner = Planner(case, repetitions)
    for work, grows in ((planner.one_more(), queries), (planner.from_nothing(), 0)):
        made.clear()
        for _ in range(WARM_UP + repetitions):
            work.seconds()
        lengths = [tile.length for found in made for tile in found.tiles]
        assert lengths == [1000 + (i + 1) * grows for i in range(WARM_UP + repetitions)]
        assert all(found.rows == queries for found in made)
