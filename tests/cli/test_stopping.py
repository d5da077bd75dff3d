"""Runs of `batch` that were stopped, and went on: whatever the moment, every line is answered, and once."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flexdecode.cli.main import main
from tests.checkpoints import puppet
from tests.cli.batching import by_key, chat, write
from tests.cli.fake import INTERRUPT, install


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_wherever_the_output_was_cut_the_rest_is_done_once(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed run can leave any number of bytes behind; tests/cli/test_ledger.py goes through all of a row's."""
    install(monkeypatch, progress=False)
    source, target = files
    write(source, {"prompt": "a"}, chat("c", "c"), {"id": "x", "prompt": "!b"})
    argv = ["batch", "m", str(source), str(target)]
    assert main(argv) == 1
    whole = target.read_bytes()
    wanted = by_key(target)
    for length in range(0, len(whole), 11):
        target.write_bytes(whole[:length])
        assert main(argv) == 1
        found = by_key(target)
        found["c"]["response"]["body"]["created"] = wanted["c"]["response"]["body"]["created"]
        assert found == wanted


def test_ctrl_c_keeps_what_is_done(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    source, target = files
    lines = [{"id": n, "prompt": f"p{n}"} for n in range(4)]
    write(source, *lines, {"id": 4, "prompt": INTERRUPT}, {"id": 5, "prompt": "p5"})
    argv = ["batch", "m", str(source), str(target)]
    assert main(argv) == 130
    assert "stopped: 3 of 6 lines are not answered; the same command goes on from here" in capsys.readouterr().err
    assert set(by_key(target)) == {1, 2, 3}


def child(pace: float, *argv: str) -> subprocess.Popen[str]:
    script = json.dumps({"pace": pace, "progress": False})
    program = [sys.executable, "-m", "tests.cli.fake", script, "batch", "m", *argv]
    return subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(target: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not target.exists() or target.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.002)


def test_real_signals_at_any_moment_lose_and_repeat_nothing(files: tuple[Path, Path]) -> None:
    source, target = files
    lines = [{"id": f"q{n}", "prompt": f"p{n}"} if n % 3 else chat(f"q{n}", f"p{n}") for n in range(120)]
    write(source, *lines)
    chance = random.Random(5)
    for kind in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        before = target.read_bytes().count(b"\n") if target.exists() else 0
        process = child(0.004, str(source), str(target))
        wait_for(target, before + chance.randint(1, 20))
        time.sleep(chance.random() * 0.004)
        process.send_signal(kind)
        _, err = process.communicate(timeout=60)
        assert process.returncode == (130 if kind == signal.SIGINT else -kind), err
        # A row that the kernel had only a part of: no signal of this test can be sure to leave one.
        with target.open("ab") as file:
            file.write(b'{"request": "5d0')
    process = child(0.0, str(source), str(target))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    found = by_key(target)
    assert set(found) == {f"q{n}" for n in range(120)}
    for n in range(120):
        row = found[f"q{n}"]
        text = row["text"] if n % 3 else row["response"]["body"]["choices"][0]["message"]["content"]
        assert text == f"re: p{n}"


def test_a_second_run_on_the_same_output_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = files
    write(source, *({"prompt": f"p{n}"} for n in range(200)))
    first = child(0.02, str(source), str(target))
    try:
        wait_for(target, 1)
        second = child(0.0, str(source), str(target))
        _, err = second.communicate(timeout=60)
        assert second.returncode == 1
        assert (
            err == f"flexdecode: error: {target} is being written by another run; wait for it, or name another file\n"
        )
    finally:
        first.kill()
        first.communicate()
    third = child(0.0, str(source), str(target))  # a lock dies with its holder
    _, err = third.communicate(timeout=60)
    assert third.returncode == 0, err
    assert set(by_key(target)) == set(range(1, 201))


@pytest.mark.slow
def test_a_real_model_killed_and_taken_up_again(tmp_path: Path, files: tuple[Path, Path]) -> None:
    """The answers are those of a run that nobody disturbed."""
    puppet(tmp_path / "model", "abc")
    source, target = files
    write(source, *({"id": n, "prompt": "<bos>", "max_tokens": 5 + n // 2, "ignore_eos": True} for n in range(100)))
    whole = tmp_path / "whole.jsonl"
    argv = [sys.executable, "-m", "flexdecode", "batch", str(tmp_path / "model"), str(source)]
    assert subprocess.run([*argv, str(whole)], capture_output=True).returncode == 0
    for kind, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        before = target.read_bytes().count(b"\n") if target.exists() else 0
        process = subprocess.Popen([*argv, str(target)], stderr=subprocess.PIPE)
        wait_for(target, before + 1)
        process.send_signal(kind)
        process.communicate(timeout=60)
        assert process.returncode == code
    assert subprocess.run([*argv, str(target)], capture_output=True).returncode == 0
    assert by_key(target) == by_key(whole)
