"""Conversations: turn by turn from a pipe, and at a real pseudo-terminal with real Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexdecode.cli.main import main
from tests.checkpoints import tiny
from tests.cli.fake import INTERRUPT, Script, install
from tests.cli.terminal import Terminal


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("FLEXDECODE_", "HF_HUB_OFFLINE")):
            monkeypatch.delenv(name)


def converse(monkeypatch: pytest.MonkeyPatch, script: Script, data: str | bytes, *flags: str) -> int:
    raw = data if isinstance(data, bytes) else data.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
    return main(["chat", "m", *flags])


def contents(call: tuple[str, Any, Any]) -> list[str]:
    return [f"{message['role'][0]}:{message['content']}" for message in call[1]]


def test_a_line_is_a_turn_and_the_history_grows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = install(monkeypatch, answers=[["one"], ["two"]])
    assert converse(monkeypatch, script, "first\n\nsecond\n", "--system", "be brief") == 0
    out, err = capsys.readouterr()
    assert out == "one\ntwo\n"
    assert err == ""
    assert contents(script.calls[0]) == ["s:be brief", "u:first"]
    assert contents(script.calls[1]) == ["s:be brief", "u:first", "a:one", "u:second"]


def test_figures_come_with_verbose(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    converse(monkeypatch, script, "hi\n", "-v")
    err = capsys.readouterr().err
    assert "temperature 0.6" in err, "the settings in force come first"
    assert err.splitlines()[-1].startswith("prompt 5 tokens")


def test_a_model_without_template_cannot_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = install(monkeypatch, has_chat_template=False)
    assert converse(monkeypatch, script, "hi\n") == 1
    assert "m has no chat template" in capsys.readouterr().err
    assert script.calls == []


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch, answers=[["one"], ["two"]])
    assert converse(monkeypatch, script, "a\nb\n", "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["text"] for row in rows] == ["one", "two"]
    assert rows[0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ('"""one\ntwo"""\n', "one\ntwo"),
        ('"""\none\n\ntwo\n"""\n', "one\n\ntwo"),
        ('"""alone"""\n', "alone"),
        ("//etc/hosts\n", "/etc/hosts"),
        (b"bad \xff\n", "bad \ufffd"),
        (b"no newline", "no newline"),
        (b"dos\r\n", "dos"),
    ],
)
def test_messages_of_several_lines_and_odd_bytes(
    typed: str | bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = install(monkeypatch)
    assert converse(monkeypatch, script, typed) == 0
    assert script.calls[0][1] == [{"role": "user", "content": message}]


def test_an_unfinished_message_is_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    assert converse(monkeypatch, script, '"""one\ntwo\n') == 1
    assert "ended inside" in capsys.readouterr().err
    assert script.calls == []


def test_commands_change_the_next_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch, answers=[["one"]])
    typed = (
        "a\n/set temperature 0.5\n/set stop END\n/system be kind\nb\n/clear\n/set temperature default\nc\n/bye\nnever\n"
    )
    assert converse(monkeypatch, script, typed, "--temp", "0.1") == 0
    first, second, third = script.calls
    assert first[2].temperature == 0.1
    assert contents(second) == ["s:be kind", "u:a", "a:one", "u:b"]
    assert (second[2].temperature, second[2].stop) == (0.5, ("END",))
    assert contents(third) == ["s:be kind", "u:c"]
    assert third[2].temperature is None
    assert capsys.readouterr().out == "one\none\none\n"


def test_retry_asks_again_without_the_old_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch, answers=[["one"], ["two"]])
    assert converse(monkeypatch, script, "a\n/retry\nb\n") == 0
    assert contents(script.calls[1]) == ["u:a"]
    assert contents(script.calls[2]) == ["u:a", "a:two", "u:b"]


def test_save_and_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch, answers=[["one"]])
    file = tmp_path / "talk.json"
    assert converse(monkeypatch, script, f"/system kind\na\n/save {file}\n") == 0
    assert converse(monkeypatch, script, f"/load {file}\nb\n") == 0
    assert contents(script.calls[1]) == ["s:kind", "u:a", "a:one", "u:b"]


@pytest.mark.parametrize(
    "typed", ["/nonsense\n", "/set\n", "/set temperature hot\n", "/set top_p 7\n", "/load absent\n"]
)
def test_without_a_terminal_the_first_error_ends_the_program(
    typed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = install(monkeypatch)
    assert converse(monkeypatch, script, typed + "hi\n") == 1
    err = capsys.readouterr().err
    assert err.startswith("flexdecode: error: ")
    assert err.count("\n") == 1
    assert script.calls == []


def test_without_a_terminal_ctrl_c_ends_the_program(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = install(monkeypatch, answers=[["Hel", INTERRUPT]])
    assert converse(monkeypatch, script, "a\nb\n") == 130
    assert capsys.readouterr().out == "Hel\n"
    assert len(script.calls) == script.closed == 1


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Any]:
    opened: list[Terminal] = []

    def start(answers: list[Any]) -> Terminal:
        script = json.dumps({"answers": answers, "progress": False})
        opened.append(Terminal(tmp_path, "-m", "tests.cli.fake", script, "chat", "m"))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def test_terminal_answers_and_ctrl_d_leaves_with_0(terminals: Any, tmp_path: Path) -> None:
    terminal = terminals([["Good day"]])
    terminal.expect(">>>")
    terminal.send("hello\r")
    terminal.expect("Good day")
    terminal.expect(">>>")
    terminal.send("\x04")
    assert terminal.exit_code() == 0
    history = tmp_path / "flexdecode" / "chat_history"
    assert "+hello" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0, "what was asked is nobody else's business"


def test_terminal_first_ctrl_c_stops_the_answer_second_leaves_with_130(terminals: Any) -> None:
    terminal = terminals([["Once upon", "<slow>"]])
    terminal.expect(">>>")
    terminal.send("a story\r")
    terminal.expect("Once upon")
    terminal.send("\x03")
    terminal.expect("[stopped]")
    terminal.expect(">>>")
    terminal.send("\x03")
    assert terminal.exit_code() == 130


def test_terminal_ctrl_c_clears_a_line_that_is_not_empty(terminals: Any) -> None:
    terminal = terminals([["Good day"]])
    terminal.expect(">>>")
    terminal.send("half a thou")
    terminal.expect("half a thou")
    terminal.send("\x03")
    terminal.send("/bye\r")
    assert terminal.exit_code() == 0


def test_terminal_alt_enter_makes_a_message_of_two_lines(terminals: Any, tmp_path: Path) -> None:
    terminal = terminals([["Good day"]])
    terminal.expect(">>>")
    terminal.send("one\x1b\rtwo\r")
    terminal.expect("Good day")
    terminal.send(f"/save {tmp_path}/talk.json\r")
    terminal.expect("written to")
    terminal.send("/bye\r")
    assert terminal.exit_code() == 0
    assert json.loads((tmp_path / "talk.json").read_text())["messages"][0]["content"] == "one\ntwo"


def test_terminal_an_error_costs_only_its_turn(terminals: Any) -> None:
    terminal = terminals([["Good day"]])
    terminal.expect(">>>")
    terminal.send("/set temperature hot\r")
    terminal.expect("flexdecode: error: temperature is a number or default, not 'hot'")
    terminal.send("hello\r")
    terminal.expect("Good day")
    terminal.send("/bye\r")
    assert terminal.exit_code() == 0


def test_a_conversation_goes_on_past_the_context_where_it_may(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real model of 256 tokens. By default the program ends at them with one line."""
    template = "<bos>{% for m in messages %}{{ m['role'] + m['content'] }}<eot>{% endfor %}assistant"
    tiny(tmp_path / "m", chat_template=template)
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    typed = "".join(f"question {i} {'?' * 20}\n" for i in range(12))
    flags = ["--temp", "0", "-n", "20", "--ignore-eos", "--dtype", "float32", "--system", "be brief"]
    assert converse(monkeypatch, Script(), typed, *flags, "--overflow", "sinks") == 0
    out, err = capsys.readouterr()
    assert out.count("\n") >= 12
    lines = err.splitlines()
    assert len(lines) == len(set(lines)) >= 2, "once for every cut"
    assert all(line.startswith("flexdecode: warning: the conversation is longer than the context") for line in lines)
    assert converse(monkeypatch, Script(), typed, *flags) == 1
    err = capsys.readouterr().err
    assert re.fullmatch(r"flexdecode: error: the conversation has \d+ tokens .* at 256; clear it, .*sinks\)\n", err)


def test_a_way_of_overflowing_reaches_the_model_or_is_refused_before_it_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = install(monkeypatch)
    assert converse(monkeypatch, script, "a\n") == 0
    assert converse(monkeypatch, script, "a\n", "--overflow", "sinks") == 0
    assert script.overflows == ["error", "sinks"]
    script.options = {}
    capsys.readouterr()
    assert converse(monkeypatch, script, "a\n", "--overflow", "drop") == 1
    assert "overflow 'drop' is not known (--overflow; known: error, sinks)" in capsys.readouterr().err
    assert script.options == {}
