"""The syntax that the command line itself checks."""

from __future__ import annotations

import pytest
import typer

from flexdecode.cli.options import SamplingOptions, parse_logit_bias
from flexdecode.generation.params import SamplingParams


def test_no_flag_is_no_setting() -> None:
    assert SamplingOptions().params() == SamplingParams()


@pytest.mark.parametrize(
    ("items", "bias"),
    [([], {}), (["1:2"], {1: 2.0}), (["1:-100", "2:0.5"], {1: -100.0, 2: 0.5}), ([" 3 : 1e1"], {3: 10})],
)
def test_logit_bias(items: list[str], bias: dict[int, float]) -> None:
    assert parse_logit_bias(items) == bias


@pytest.mark.parametrize("item", ["", ":", "1", "1:", ":2", "a:1", "1:b", "1:2:3", "1.5:2"])
def test_logit_bias_that_is_none(item: str) -> None:
    with pytest.raises(typer.BadParameter, match="ID:VALUE"):
        parse_logit_bias([item])
