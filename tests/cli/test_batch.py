"""`batch`: lines in, rows out, whatever a line asks and whenever the run is stopped."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flexdecode.cli.main import main
from flexdecode.cli.options import EngineOptions
from tests.checkpoints import byte_tokenizer, puppet
from tests.cli.batching import by_key, chat, openai, rows, write
from tests.cli.fake import install
from tests.cli.terminal import Terminal

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FLEXDECODE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_each_line_is_answered_in_its_own_shape(
    tmp_path: Path, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that says abc, a file with lines of every kind and every fault: nothing stops the run."""
    puppet(tmp_path / "model", "abc")
    byte_tokenizer(tmp_path / "model", TEMPLATE)
    source, target = files
    write(
        source,
        {"prompt": "<bos>"},
        "\n",
        {"id": "two", "prompt": [256], "n": 2, "max_tokens": 2, "logprobs": 1},
        {"id": "talk", "messages": [{"role": "user", "content": "xa"}], "stop": "c"},
        "this is no line\n",
        chat("chat", "xb", logprobs=True, top_logprobs=1, max_tokens=5),
        openai("text", "/v1/completions", prompt=["<bos>", "xa"], max_tokens=3),
        chat("tools", "x", tools=[{"type": "function"}]),
        {"id": "empty", "prompt": ""},
        {"id": "long", "prompt": [1] * 600},
        openai("", "/v1/completions", prompt="<bos>"),
        json.dumps({"id": "last", "prompt": "<bos>"}),  # no newline at its end
    )
    assert main(["batch", str(tmp_path / "model"), str(source), str(target), "--dtype", "fp32", "-n", "9"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == "flexdecode: error: 4 of 11 lines failed; their rows say why"
    found = {row["custom_id"] if "custom_id" in row else row["id"]: row for row in rows(target)}
    assert set(found) == {1, "two", "talk", 5, "chat", "text", "tools", "empty", "long", "", "last"}
    assert len(rows(target)) == 11
    first = found[1]
    assert (first["text"], first["token_ids"], first["finish_reason"]) == ("abc", [97, 98, 99, 257], "stop")
    assert first["usage"] == {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}
    assert [(one["text"], one["finish_reason"]) for one in found["two"]["choices"]] == [("ab", "length")] * 2
    assert found["two"]["choices"][0]["logprobs"][0]["token_id"] == 97
    assert (found["talk"]["text"], found["talk"]["finish_reason"]) == ("b", "stop")
    assert found["last"]["text"] == "abc"

    told = found["chat"]
    assert set(told) == {"id", "custom_id", "response", "error"}
    assert (told["error"], told["response"]["status_code"]) == (None, 200)
    body = told["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "any")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "c", "refusal": None}
    assert [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]] == ["c"]
    body = found["text"]["response"]["body"]
    assert [choice["text"] for choice in body["choices"]] == ["abc", "bc"]
    assert found[""]["response"]["body"]["choices"][0]["text"] == "abc"

    assert found[5]["error"]["line"] == 5
    assert "not JSON" in found[5]["error"]["message"]
    assert (found["tools"]["error"]["line"], found["tools"]["response"]["status_code"]) == (8, 400)
    assert found["tools"]["response"]["body"]["error"]["param"] == "tools"
    assert "empty" in found["empty"]["error"]["message"]
    assert "600" in found["long"]["error"]["message"]
    assert "512" in found["long"]["error"]["message"]


def test_flags_are_defaults_for_lines_that_give_none(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    source, target = files
    write(source, {"prompt": "a"}, {"prompt": "b", "temperature": 0}, chat("c", "c", max_tokens=3))
    flags = ["-n", "9", "--temp", "0.5", "--seed", "1", "--stop", "END", "--dtype", "float32", "--mask", "causal"]
    flags += ["--speculate", "lookup"]
    assert main(["batch", "m", str(source), str(target), *flags]) == 0
    a, b, c = (params for _, _, params in script.calls)
    assert (a.max_tokens, a.temperature, a.seed, a.stop) == (9, 0.5, 1, ("END",))
    assert (b.max_tokens, b.temperature) == (9, 0.0)
    assert (c.max_tokens, c.temperature) == (3, 0.5)
    assert (script.options["dtype"], script.options["mask"]) == ("float32", "causal")
    assert script.options["speculate"] == "lookup"


def test_the_summary(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    source, target = files
    write(source, {"prompt": "a"}, {"prompt": "b", "n": 2})
    assert main(["batch", "m", str(source), str(target)]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("2 answered, 0 failed | prompt 10 tokens | new 9 tokens, ")
    assert err.count("\n") == 1
    write(source, {"prompt": "a"}, {"prompt": "b", "n": 2}, {"prompt": "!c"})
    assert main(["batch", "m", str(source), str(target), "--json"]) == 1
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["lines"], told["skipped"], told["answered"], told["failed"], told["left"]) == (3, 2, 0, 1, 0)
    assert err == "flexdecode: error: 1 of 3 lines failed; their rows say why\n"


def test_pipes(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    _, target = files
    data = b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main(["batch", "m", "-", "-"]) == 0
    out, err = capsys.readouterr()
    assert {row["id"]: row["text"] for row in map(json.loads, out.splitlines())} == {1: "re: a", 2: "re: b"}
    assert err.startswith("2 answered")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data + b'\n{"prompt": "c"}')))
    write(target, *map(json.loads, out.splitlines()))
    assert main(["batch", "m", "-", str(target)]) == 0
    assert set(by_key(target)) == {1, 2, 3}


@pytest.mark.parametrize("flag", ["--json", "--retry-errors"])
def test_what_stdout_cannot_hold_is_wrong_usage(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", "m", "-", "-", flag]) == 2
    assert flag in capsys.readouterr().err


def test_a_named_pipe_as_input(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    source, target = files
    os.mkfifo(source)
    with subprocess.Popen([sys.executable, "-c", f"open({str(source)!r}, 'w').write('{{\"prompt\": \"a\"}}')"]):
        assert main(["batch", "m", str(source), str(target)]) == 0
    assert by_key(target)[1]["text"] == "re: a"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            [{"id": "a", "prompt": "x"}, {"prompt": "y"}, {"id": "a", "prompt": "z"}],
            "lines 1 and 3 both have the id 'a'",
        ),
        ([{"prompt": "x"}, {"id": 1, "prompt": "y"}], "lines 1 and 2 both have the id 1"),
        ([chat("a", "x"), {"id": "a", "prompt": "y"}], "lines 1 and 2 both have the id 'a'"),
    ],
)
def test_ids_that_are_there_twice_are_refused_before_any_work(
    lines: list[Any],
    words: str,
    files: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = install(monkeypatch)
    source, target = files
    write(source, *lines)
    assert main(["batch", "m", str(source), str(target)]) == 1
    assert words in capsys.readouterr().err
    assert script.options == {}
    assert not target.exists()


def test_files_that_cannot_be_are_refused_before_any_work(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = install(monkeypatch)
    source, target = files
    argv = ["batch", "m", str(source), str(target)]
    assert main(argv) == 1
    assert f"{source} cannot be read: No such file" in capsys.readouterr().err
    write(source, chat("a", "x"))
    assert main([*argv[:3], str(source)]) == 1
    assert "both IN and OUT" in capsys.readouterr().err
    write(target, {"request": "0" * 24, "id": "other", "text": "x"})
    assert main(argv) == 1
    assert "'other', which" in capsys.readouterr().err
    assert main([*argv[:3], str(source.parent)]) == 1
    assert main([*argv[:2], str(source.parent), str(target)]) == 1
    assert script.options == {}


def test_an_empty_input_is_an_empty_output(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    source, target = files
    write(source, "\n", " \n")
    assert main(["batch", "m", str(source), str(target)]) == 0
    assert target.read_bytes() == b""
    assert script.options == {}, "the model is not loaded for nothing"


def test_failed_lines_are_tried_again_only_when_asked(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = install(monkeypatch)
    source, target = files
    argv = ["batch", "m", str(source), str(target)]
    write(source, {"id": "a", "prompt": "a"}, {"id": "b", "prompt": "!b"}, "no line\n")
    assert main(argv) == 1
    write(source, {"id": "a", "prompt": "a"}, {"id": "b", "prompt": "b"}, {"id": "c", "prompt": "c"})
    assert main(argv) == 1
    assert "answers id 3, which" in capsys.readouterr().err
    write(source, {"id": "a", "prompt": "a"}, {"id": "b", "prompt": "b"}, "no line\n")
    asked = len(script.calls)
    assert main(argv) == 1
    assert "2 of 3 lines failed (2 in an earlier run; --retry-errors tries again)" in capsys.readouterr().err
    assert len(script.calls) == asked
    write(source, {"id": "a", "prompt": "a"}, {"id": "b", "prompt": "b"}, {"id": "c", "prompt": "c"})
    assert main([*argv, "--retry-errors"]) == 0
    assert len(script.calls) == asked + 2
    assert {key: row["text"] for key, row in by_key(target).items()} == {"a": "re: a", "b": "re: b", "c": "re: c"}


def test_an_answer_is_never_taken_for_that_of_another_line(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines without ids are known by their numbers: one put in front would shift every answer by one."""
    install(monkeypatch)
    source, target = files
    write(source, {"prompt": "a"}, {"prompt": "b"})
    assert main(["batch", "m", str(source), str(target)]) == 0
    before = target.read_bytes()
    write(source, {"prompt": "new"}, {"prompt": "a"}, {"prompt": "b"})
    assert main(["batch", "m", str(source), str(target)]) == 1
    assert "asks something else by now" in capsys.readouterr().err
    assert target.read_bytes() == before


def test_an_input_that_changes_under_way_is_an_error(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    source, target = files
    write(source, {"prompt": "a"}, {"prompt": "b"})

    real = EngineOptions.load

    def changing(self: EngineOptions, *args: Any) -> Any:
        source.write_text(json.dumps({"prompt": "a"}) + "\n")
        return real(self, *args)

    monkeypatch.setattr(EngineOptions, "load", changing)
    assert main(["batch", "m", str(source), str(target)]) == 1
    assert "had 2 lines and has 1 now" in capsys.readouterr().err


def test_a_bar_with_lines_and_tokens_on_a_terminal(files: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = files
    write(source, *({"prompt": f"p{n}"} for n in range(40)))
    script = json.dumps({"pace": 0.03})
    terminal = Terminal(tmp_path, "-m", "tests.cli.fake", script, "batch", "m", str(source), str(target))
    try:
        terminal.expect("answering")
        terminal.expect(" of 40 lines, ")
        terminal.expect(" tok/s")
        terminal.expect("40 answered, 0 failed")
        assert terminal.exit_code() == 0
    finally:
        terminal.close()
