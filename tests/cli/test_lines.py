"""Messages from lines, and the history's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexdecode.cli.lines import _history, history_path, read_message


def source(*lines: str) -> object:
    waiting = list(lines)

    def read(prompt: str) -> str:
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    return read


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["plain"], "plain"),
        (['say """this"""'], 'say """this"""'),
        (['"""', "a", '"""'], "a"),
        (['"""a', "", 'b"""'], "a\n\nb"),
        (['  """a  ', '  b  """  '], "a  \n  b  "),
        (['""""""'], ""),
    ],
)
def test_three_quotes_hold_several_lines(lines: list[str], message: str) -> None:
    assert read_message(source(*lines)) == message  # type: ignore[arg-type]


def test_the_end_of_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EOFError):
        read_message(source())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ended inside"):
        read_message(source('"""', "a"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("state", "inside"), [("/state", "/state"), ("", "HOME"), ("relative", "HOME")])
def test_history_lies_in_the_state_directory(
    state: str, inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", state)
    base = tmp_path / ".local" / "state" if inside == "HOME" else Path(inside)
    assert history_path() == base / "flexdecode" / "chat_history"


def test_a_history_that_cannot_be_written_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flexdecode").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert type(_history()).__name__ == "InMemoryHistory"
    assert "history is not kept" in capsys.readouterr().err
