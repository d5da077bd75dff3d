"""Where a chat's lines come from: a terminal with editing and history, or any other stdin, a line at a time.

Knows terminals and the history's place on disk, no conversation. A prompt is written to stderr, since stdout is for
answers alone.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flexdecode.cli.text import clean, decode, warn

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

FENCE = '"""'
ReadLine = Callable[[str], str]


def read_message(read: ReadLine) -> str:
    """The next message: a line, or the lines between a line that begins with three quotes and one that ends with
    them. Raises EOFError at the end of the input, KeyboardInterrupt at Ctrl-C."""
    first = read(">>> ")
    if not first.lstrip().startswith(FENCE):
        return first
    rest = first.lstrip().removeprefix(FENCE)
    lines = []
    while not rest.rstrip().endswith(FENCE):
        lines.append(rest)
        try:
            rest = read("... ")
        except EOFError:
            raise ValueError(f"the input ended inside a message that {FENCE} began") from None
    lines.append(rest.rstrip().removesuffix(FENCE))
    return "\n".join(lines).strip("\n")


def is_interactive() -> bool:
    """Whether a person sits at both ends: stdin gives keys, and stderr shows the prompt."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def plain_reader() -> ReadLine:
    """Lines of stdin, without prompts."""
    buffer = getattr(sys.stdin, "buffer", None)

    def read(prompt: str) -> str:
        line = sys.stdin.readline() if buffer is None else decode(buffer.readline(), "a line of stdin")
        if not line:
            raise EOFError
        return clean(line, "a line of stdin").removesuffix("\n").removesuffix("\r")

    return read


def terminal_reader(completions: list[str]) -> ReadLine:
    """Lines with editing, history kept between runs, and `completions` for the first word."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.output import create_output

    session: PromptSession[str] = PromptSession(
        history=_history(),
        auto_suggest=AutoSuggestFromHistory(),
        completer=WordCompleter(completions, sentence=True),
        complete_while_typing=False,
        key_bindings=_keys(),
        output=create_output(stdout=sys.stderr),
        prompt_continuation="... ",
    )

    def read(prompt: str) -> str:
        return clean(session.prompt(prompt), "the message")

    return read


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _clear_or_leave(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt(), style="class:aborting")

    return keys


def history_path() -> Path:
    """Where the XDG base directory specification puts the state of a program that should outlive a restart."""
    state = os.environ.get("XDG_STATE_HOME") or ""
    # The specification says that a relative path is to be ignored.
    base = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    return base / "flexdecode" / "chat_history"


def _history() -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path = history_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        with path.open("ab"):
            pass
    except (OSError, RuntimeError) as error:
        warn(f"this chat's history is not kept: {error}")
        return InMemoryHistory()
    return FileHistory(path)
