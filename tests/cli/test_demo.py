"""The whole way, with the demo model: from a command line to text."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from flexdecode.cli.main import main
from tests.cli.terminal import Terminal

pytestmark = pytest.mark.slow
GREEDY = ["--temperature", "0"]


def test_generate(capsys: pytest.CaptureFixture[str]) -> None:
    # In bf16 two answers to this question are equally likely to the last bit; in fp32 they are not.
    argv = ["generate", "demo", "-p", "What is the capital of France?", "-n", "24", "--dtype", "float32", *GREEDY]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "Paris" in out
    assert "prompt " in err
    assert "peak memory" in err


def test_json_holds_what_the_plain_run_prints(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "demo", "-p", "Once upon a time", "--raw", "-n", "8", *GREEDY]
    assert main(argv) == 0
    plain = capsys.readouterr().out
    assert main([*argv, "--json", "--logprobs", "2"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["text"] + "\n" == plain
    assert (len(data["token_ids"]), data["finish_reason"]) == (8, "length")
    assert [entry["token_id"] for entry in data["logprobs"]] == data["token_ids"]
    assert all(entry["top"][0] == [entry["token_id"], entry["logprob"]] for entry in data["logprobs"])
    assert data["model"]["name"] == "demo"


def test_inspect_reads_headers_and_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "demo", "--max-context", "1024", "--measure", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["layers"], report["vocab_size"]) == (30, 49152)
    assert report["needs"]["max_context"] == 1024
    assert report["measured"]["weights_held_bytes"] > 50e6
    assert main(["inspect", "demo"]) == 0
    assert "bytes by part" in capsys.readouterr().out


def test_chat_remembers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n/show\nWhat is two plus two?\n")))
    assert main(["chat", "demo", "-n", "8", *GREEDY]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) >= 2
    assert "messages: 2" in err


def test_chat_goes_on_after_ctrl_c(tmp_path: Path) -> None:
    """A real signal in the midst of a real step: the engine must give back what the request held and serve the next."""
    terminal = Terminal(tmp_path, "-m", "flexdecode", "chat", "demo", *GREEDY)
    try:
        terminal.expect(">>>", seconds=120)
        terminal.send("Write a very long story about the sea, with many chapters.\r")
        terminal.expect("\x1b[?2004l")  # the line editor has let go of the terminal: what follows is the answer
        terminal.expect(" the ", seconds=120)
        terminal.send("\x03")
        terminal.expect("[stopped]")
        terminal.send("/clear\r")
        terminal.expect("the conversation is empty")
        terminal.send("/set n 6\r")
        terminal.expect(">>>")
        terminal.send("Hello\r")
        terminal.expect("\x1b[?2004l")
        terminal.expect(">>>", seconds=120)
        terminal.send(f"/save {tmp_path}/talk.json\r")
        terminal.expect("2 messages written", seconds=120)
        terminal.expect(">>>")
        terminal.send("\x04")
        assert terminal.exit_code() == 0
        question, answer = json.loads((tmp_path / "talk.json").read_text())["messages"]
        assert question == {"role": "user", "content": "Hello"}
        assert answer["content"].strip()
    finally:
        terminal.close()
