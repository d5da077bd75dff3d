"""Tables that mods hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexdecode.attention.tables import Table, abbreviated, one_line, out_of_range, take


def test_a_table_is_its_content() -> None:
    values = torch.arange(6.0)
    made = Table(values)
    assert made == Table(values.clone())
    assert hash(made) == hash(Table(values.clone()))
    assert made != Table(values.view(2, 3))
    assert made != Table(torch.zeros(6))
    assert Table(torch.zeros(2)) != Table(torch.zeros(1, dtype=torch.int64))  # the same bytes
    assert made != values.tolist()
    values[0] = 9
    assert made.tensor[0] == 0


@given(st.lists(st.integers(-12, 12), min_size=1, max_size=5))
@settings(deadline=None)
def test_a_look_up_never_wraps(indices: list[int]) -> None:
    table, at = torch.arange(10, 20), torch.tensor(indices)
    mapped = torch.vmap(lambda i: take(table, i, fault="{index} of {size}"))
    if all(0 <= i < 10 for i in indices):
        assert take(table, at, fault="").tolist() == mapped(at).tolist() == [10 + i for i in indices]
        return
    for look_up in (lambda: take(table, at, fault="{index} of {size}"), lambda: mapped(at)):
        with pytest.raises(ValueError, match=r"^-?\d+ of 10$") as caught:
            look_up()
        assert int(str(caught.value).split()[0]) in [i for i in indices if not 0 <= i < 10]


def test_a_look_up_by_two_indices_broadcasts() -> None:
    table = torch.arange(12).view(3, 4)
    rows, columns = torch.arange(3)[:, None], torch.arange(4)
    assert torch.equal(take(table, rows, columns, fault=""), table)
    with pytest.raises(ValueError, match="row 3 of 3"):
        take(table, rows + 1, columns, fault="row {index} of {size}")


def test_other_errors_are_not_about_a_range() -> None:
    assert out_of_range(IndexError("too many indices")) is None
    assert out_of_range(ValueError("index 3 is out of bounds for dimension 0 with size 3")) is None


@given(st.one_of(st.text(), st.lists(st.integers()), st.just(torch.rand(40, 40))))
def test_one_line_is_one_short_line(value: str | list[int] | Tensor) -> None:
    assert "\n" not in one_line(value)
    assert len(one_line(value)) <= 61


def test_a_long_list_is_cut_in_the_middle() -> None:
    assert abbreviated(list(range(16))) == str(list(range(16)))
    assert abbreviated(list(range(17))) == "[0, 1, 2, 3, 4, 5, 6, 7, …, 9, 10, 11, 12, 13, 14, 15, 16]"
    assert abbreviated([]) == "[]"
