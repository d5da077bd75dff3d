"""Groups of options: spread out for typer, gathered again for the verb."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from flexdecode.cli.verb import option, verb


@dataclass(frozen=True)
class Size:
    width: Annotated[int, option("--width", "-w", help="w")] = 1
    tags: Annotated[list[str] | None, option("--tag", help="t")] = None


def test_a_group_is_spread_out_and_gathered() -> None:
    got: list[object] = []
    app = typer.Typer()

    @app.command()
    @verb
    def command(name: Annotated[str, typer.Argument()], size: Size) -> None:
        got.extend([name, size])

    assert list(inspect.signature(command).parameters) == ["name", "width", "tags", "debug"]
    result = CliRunner().invoke(app, ["x", "-w", "3", "--tag", "a", "--tag", "b"])
    assert result.exit_code == 0, result.output
    assert got[0] == "x"
    assert isinstance(got[1], Size)
    assert (got[1].width, list(got[1].tags or ())) == (3, ["a", "b"])


def test_the_same_option_twice_is_our_own_mistake() -> None:
    def command(width: Annotated[int, option("--width", help="w")], size: Size) -> None: ...

    with pytest.raises(AssertionError, match="width"):
        verb(command)
