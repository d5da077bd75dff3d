"""Exit codes, and which stream an error goes to."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flexdecode import __version__
from flexdecode.cli.main import main
from tests.cli.fake import install

GENERATE = ["generate", "some-model", "-p", "hi"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"flexdecode {__version__}\n"


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["generate", "--help"], ["chat", "-h"]])
def test_help_is_a_success_on_stdout(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "Usage" in out
    assert err == ""


def test_without_a_verb_the_help_is_shown_as_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "generate" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["unknown-verb"], "unknown-verb"),
        (["generate"], "MODEL"),
        (["generate", "m", "-p", "x", "--no-such-flag"], "--no-such-flag"),
        (["generate", "m", "-p", "x", "--top-k", "many"], "--top-k"),
        (["generate", "m", "-p", "x", "--logit-bias", "5=1"], "5=1"),
        (["generate", "m", "-p", "x", "--logit-bias", "5:1", "--logit-bias", "5:2"], "5"),
        (["generate", "m", "-p", "x", "-f", "y"], "-f"),
        (["generate", "m"], "prompt"),
        (["generate", "m", "-p", "x", "--raw", "--system", "s"], "--system"),
    ],
)
def test_wrong_usage_exits_2_and_names_what_is_wrong(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = install(monkeypatch)
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("flexdecode: error: ")
    assert named in last
    assert script.options == {}, "a usage error must come before the model is loaded"


@pytest.mark.parametrize("error", [ValueError("context is 9, model has 8"), OSError("disk is gone")])
def test_a_mistake_is_one_line_on_stderr(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, load_error=error)
    assert main(GENERATE) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"flexdecode: error: {error}\n"


def test_a_message_of_several_lines_becomes_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, load_error=ValueError("first\nsecond"))
    assert main(GENERATE) == 1
    assert capsys.readouterr().err == "flexdecode: error: first second\n"


def test_our_own_fault_names_its_kind_and_shows_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, load_error=RuntimeError("shape [3]"))
    assert main(GENERATE) == 1
    err = capsys.readouterr().err
    assert err == "flexdecode: error: RuntimeError: shape [3] (--debug shows the traceback)\n"


@pytest.mark.parametrize("argv", [["--debug", *GENERATE], [*GENERATE, "--debug"]])
@pytest.mark.parametrize("error", [ValueError("wrong"), RuntimeError("wrong")])
def test_debug_shows_the_traceback_wherever_it_stands(
    argv: list[str], error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, load_error=error)
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("flexdecode: error: ")


def test_ctrl_c_while_loading_exits_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    script.load_error = KeyboardInterrupt()  # type: ignore[assignment]
    assert main(GENERATE) == 130
    assert capsys.readouterr().out == ""


def test_a_reader_that_leaves_ends_the_program_quietly() -> None:
    """`flexdecode generate … | head -1`: the pipe closes under the answer, which must neither raise nor go on."""
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.fake", '{"answers": [["a\\n", "b\\n", "c\\n"]]}', *GENERATE],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        env=_without_ours(),
    )
    os.close(write_end)
    os.close(read_end)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == ""


def test_python_dash_m_is_the_same_program() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "flexdecode", "--version"],
        capture_output=True,
        text=True,
        check=True,
        env=_without_ours(),
    )
    assert told.stdout == f"flexdecode {__version__}\n"


def test_an_ascii_terminal_cannot_make_an_answer_raise() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "tests.cli.fake", '{"answers": [["na\\u00efve \\ud83d\\ude42"]]}', *GENERATE],
        capture_output=True,
        env={**_without_ours(), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout == b"na?ve ?\n"


def _without_ours() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("FLEXDECODE_", "HF_HUB_"))}
