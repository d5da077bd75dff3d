"""Windows: by hand, and what must hold of any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexdecode.evaluation.windows import Window, choose_context, cut, windows


def test_by_hand_without_bos() -> None:
    # Ten tokens, four read at a time, two further each time. Token 0 has nothing before it.
    assert list(windows(10, 4, 2)) == [
        Window((), 0, 4, 1),  # reads 0..3, predicts 1..4
        Window((), 2, 6, 5),  # reads 2..5, predicts 5 and 6
        Window((), 4, 8, 7),
        Window((), 6, 9, 9),  # reads 6..8, predicts 9
    ]


def test_by_hand_with_bos_side_by_side() -> None:
    ids = list("abcdefg")
    found = list(windows(7, 3, 3, prefix=[99]))
    assert [w.inputs(ids) for w in found] == [[99, "a", "b"], [99, "d", "e"], [99]]  # type: ignore[arg-type]
    assert [w.targets(ids) for w in found] == [["a", "b", "c"], ["d", "e", "f"], ["g"]]  # type: ignore[arg-type]
    assert [w.row for w in found] == [0, 0, 0]


def test_a_row_predicts_the_token_after_it() -> None:
    window = list(windows(10, 4, 2, prefix=[99]))[1]
    ids = list(range(10))
    assert window.inputs(ids) == [99, 2, 3, 4]
    assert window.targets(ids) == [4, 5]
    assert window.inputs(ids)[window.row] == 3


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    context = draw(st.integers(1, 40))
    return draw(st.integers(0, 200)), context, draw(st.integers(1, context)), draw(st.sampled_from([[], [99]]))


@given(cuts())
def test_every_token_is_scored_once_with_enough_before_it(case: tuple[int, int, int, list[int]]) -> None:
    count, context, stride, prefix = case
    ids = list(range(count))
    found = list(windows(count, context, stride, prefix))
    assert [t for w in found for t in w.targets(ids)] == ids[0 if prefix else 1 :]
    for number, window in enumerate(found):
        inputs, targets = window.inputs(ids), window.targets(ids)
        assert 1 <= len(inputs) <= context
        assert inputs[: len(prefix)] == prefix
        assert len(inputs) - window.row == len(targets) == window.count
        if number:
            assert window.row + 1 >= context - stride + 1
        for row, target in enumerate(targets, start=window.row):
            before = inputs[row] if row >= len(prefix) else target - 1
            assert before == target - 1


@given(st.integers(0, 200), st.integers(1, 40), st.sampled_from([[], [99]]))
def test_stride_of_the_context_means_disjoint(count: int, context: int, prefix: list[int]) -> None:
    ids = list(range(count))
    read = [t for w in windows(count, context, context, prefix) for t in w.inputs(ids)[len(prefix) :]]
    assert len(read) == len(set(read))
    if not prefix:
        assert read == ids[:-1]


@pytest.mark.parametrize(
    ("context", "stride", "words"),
    [(0, 1, "context must be at least 1"), (8, 0, "stride is 0"), (8, 9, "stride is 9: it must be between 1 and the")],
)
def test_wrong_numbers(context: int, stride: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list(windows(10, context, stride))


def test_documents_are_cut_each_by_itself() -> None:
    assert [number for number, _ in cut([[1, 2, 3], [], [4], [5, 6]], 2, 2, ())] == [0, 3]
    assert [number for number, _ in cut([[1, 2, 3], [], [4]], 2, 2, (9,))] == [0, 0, 2]
    with pytest.raises(ValueError, match="2 tokens in 3 documents, and none of them follows"):
        cut([[1], [], [2]], 8, 8, ())


def test_context_by_default_and_too_much() -> None:
    assert choose_context(None, 256) == 256
    assert choose_context(None, 8192) == 1024
    assert choose_context(2048, 2048) == 2048
    with pytest.raises(ValueError, match=r"context=2049 is more than the model's 2048"):
        choose_context(2049, 2048)
