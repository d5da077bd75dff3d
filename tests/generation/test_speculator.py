"""A request's proposer is asked for what the policy chooses, and its end is told; masks that look ahead are refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flexdecode.attention.masks import causal, prefix_lm, window
from flexdecode.generation.speculative import DraftModel, Speculation, SpeculationCounts
from flexdecode.generation.speculator import Speculator, refuse_looking_ahead


def test_a_proposer_is_asked_for_what_is_chosen_and_there_is_room_for() -> None:
    asked: list[tuple[list[int], int]] = []
    over: list[bool] = []

    def go_on(tokens: Sequence[int], most: int) -> Sequence[int]:
        asked.append((list(tokens), most))
        return [5] * most

    def unread() -> Sequence[int]:
        raise AssertionError

    draft = DraftModel(go_on, 100, lambda: over.append(True))
    speculator = Speculator(draft, Speculation(lambda rows: 1.0, most=3))
    assert speculator.most == 3
    speculator.record(0, 0)  # of a step in which there was nothing to choose
    assert speculator.counts.steps == 0
    assert speculator.propose(unread, 0, 0) == speculator.propose(unread, -4, 0) == ()
    assert speculator.propose(lambda: [1, 2], 2, 0) == (5, 5)
    speculator.record(2, 1)
    speculator.record(0, 0)
    assert speculator.propose(lambda: [1], 9, 0) == (5, 5, 5)
    assert asked == [([1, 2], 2), ([1], 3)]
    assert speculator.counts == SpeculationCounts(1, 2, 1)
    speculator.close()
    assert over == [True]


def test_masks_that_look_ahead_are_refused_by_name() -> None:
    refuse_looking_ahead([causal(), causal() & window(3)])
    with pytest.raises(ValueError, match=r"speculated under causal\(\) \| sinks\(4\): .*--speculate off"):
        refuse_looking_ahead([causal(), prefix_lm(4)])
