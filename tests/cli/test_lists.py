"""Lists in options."""

from __future__ import annotations

import pytest

from flexdecode.cli.lists import numbers, shapes_of


def test_numbers_and_shapes() -> None:
    assert numbers("lengths", "1, 20,300") == [1, 20, 300]
    assert shapes_of("64x128, 2x3") == [(64, 128), (2, 3)]


@pytest.mark.parametrize("text", ["", "4k", "1,,2", "1.5"])
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--lengths .* is not a list of whole numbers"):
        numbers("lengths", text)


def test_numbers_begin_at_one() -> None:
    with pytest.raises(ValueError, match="--lengths '4,0' holds a number below 1"):
        numbers("lengths", "4,0")


@pytest.mark.parametrize("text", ["", "64", "64x", "64x128x2", "0x64", "64X128", "64x-1"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--shapes"):
        shapes_of(text)
