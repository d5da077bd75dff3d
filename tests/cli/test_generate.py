"""What `generate` asks of the model, and what it prints where."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flexdecode.cli.main import main
from tests.cli.fake import INTERRUPT, install


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("FLEXDECODE_", "HF_HUB_OFFLINE")):
            monkeypatch.delenv(name)


class Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")


def test_text_to_stdout_and_figures_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    assert main(["generate", "m", "-p", "hi"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello, world\n"
    assert err.startswith("prompt 5 tokens, 10.0 tok/s | new 3 tokens, 8.0 tok/s | first token 0.500 s | peak memory ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("verb", [["generate", "m", "-p", "hi"], ["chat", "m"]], ids=lambda verb: str(verb[0]))
@pytest.mark.parametrize("given", [[], ["--speculate", "lookup"], ["--speculate", "small/model"]], ids=str)
def test_who_guesses(verb: list[str], given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    monkeypatch.setattr(sys, "stdin", Stdin(b""))
    assert main([*verb, *given]) == 0
    assert script.options["speculate"] == (given[1] if given else "off")


def test_the_answer_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece is written and flushed before the next one is asked for."""
    script = install(monkeypatch)
    seen: list[str] = []

    class Out(io.StringIO):
        def flush(self) -> None:
            seen.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Out())
    assert main(["generate", "m", "-p", "hi"]) == 0
    assert seen[:3] == ["Hello", "Hello, ", "Hello, world"]
    assert script.closed == 1


def test_chat_template_is_used_when_the_model_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    main(["generate", "m", "-p", "hi", "--system", "be brief"])
    kind, messages, _ = script.calls[0]
    assert kind == "stream_chat"
    assert messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize(("template", "flags"), [(True, ["--raw"]), (False, []), (False, ["--raw"])])
def test_without_template_or_with_raw_the_prompt_goes_as_it_is(
    template: bool, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = install(monkeypatch, has_chat_template=template)
    main(["generate", "m", "-p", "hi", *flags])
    assert script.calls[0][:2] == ("stream", "hi")


def test_a_system_text_is_never_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a template the request still goes to the chat, which refuses it by name."""
    script = install(monkeypatch, has_chat_template=False)
    main(["generate", "m", "-p", "hi", "--system", "be brief"])
    assert script.calls[0][0] == "stream_chat"


@pytest.mark.parametrize(("flags", "words"), [([], "chat template"), (["--raw"], "as it is")])
def test_verbose_says_which_form_and_which_settings(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    main(["generate", "m", "-p", "hi", "-v", "--top-k", "7", *flags])
    out, err = capsys.readouterr()
    assert out == "Hello, world\n"
    assert words in err
    assert "temperature 0.6" in err
    assert "top_k 7" in err
    assert "family: fake" in err


@pytest.mark.parametrize("spelling", ["--temperature", "--temp"])
@pytest.mark.parametrize("length", ["--max-tokens", "-n"])
def test_every_sampling_flag_reaches_its_field(spelling: str, length: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    flags = [length, "9", spelling, "0.5", "--top-k", "4", "--top-p", "0.9", "--min-p", "0.1", "--seed", "0"]
    flags += ["--repetition-penalty", "1.1", "--presence-penalty", "-0.5", "--frequency-penalty", "0.25"]
    flags += ["--logit-bias", "5:-100", "--logit-bias", "6:2.5", "--stop", "END", "--stop", "a b"]
    flags += ["--stop-token-id", "3", "--stop-token-id", "4", "--ignore-eos", "--logprobs", "2"]
    assert main(["generate", "m", "-p", "hi", *flags]) == 0
    params = script.calls[0][2]
    assert (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (9, 0.5, 4, 0.9, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, -0.5, 0.25)
    assert (params.seed, params.ignore_eos, params.logprobs) == (0, True, 2)
    assert dict(params.logit_bias) == {5: -100.0, 6: 2.5}
    assert (params.stop, params.stop_token_ids) == (("END", "a b"), (3, 4))


def test_flags_left_out_are_left_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    main(["generate", "m", "-p", "hi"])
    params = script.calls[0][2]
    unset = (params.max_tokens, params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty)
    assert unset == (None,) * 6
    assert (params.seed, params.logprobs) == (None, None)


def test_every_engine_flag_reaches_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    flags = ["--dtype", "float32", "--kv-dtype", "int8", "--device", "cpu", "--attention", "reference"]
    flags += ["--mask", "causal", "--replace-mask"]
    flags += [
        "--max-context",
        "512",
        "--kv-memory",
        "1GiB",
        "--ignore-memory",
        "--batch-invariant",
        "--threads",
        "1",
        "--revision",
        "main",
        "--offline",
    ]
    flags += ["--ignore-config", "a", "--ignore-config", "b"]
    assert main(["generate", "m", "-p", "hi", *flags]) == 0
    script.options.pop("progress")
    assert script.options == {
        "model": "m",
        "dtype": "float32",
        "kv_dtype": "int8",
        "device": "cpu",
        "attention": "reference",
        "mask": "causal",
        "replace_mask": True,
        "max_context": 512,
        "kv_memory": "1GiB",
        "ignore_memory": True,
        "batch_invariant": True,
        "threads": 1,
        "revision": "main",
        "offline": True,
        "ignore_config": ("a", "b"),
        "speculate": "off",
    }


def test_a_wrong_setting_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = install(monkeypatch)
    assert main(["generate", "m", "-p", "hi", "--top-p", "7"]) == 1
    assert "top_p" in capsys.readouterr().err
    assert script.options == {}


def test_variables_set_what_flags_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    script = install(monkeypatch)
    monkeypatch.setenv("FLEXDECODE_TEMPERATURE", "0.25")
    monkeypatch.setenv("FLEXDECODE_SEED", "3")
    monkeypatch.setenv("FLEXDECODE_LOGIT_BIAS", "1:2 3:4")
    monkeypatch.setenv("FLEXDECODE_RAW", "1")
    main(["generate", "m", "-p", "hi", "--seed", "4"])
    kind, _, params = script.calls[0]
    assert (kind, params.temperature, params.seed, dict(params.logit_bias)) == ("stream", 0.25, 4, {1: 2.0, 3: 4.0})


@pytest.mark.parametrize(
    ("variable", "value", "offline"),
    [
        ("HF_HUB_OFFLINE", "1", True),
        ("HF_HUB_OFFLINE", "ON", True),
        ("HF_HUB_OFFLINE", "0", False),
        ("HF_HUB_OFFLINE", "", False),
        ("FLEXDECODE_OFFLINE", "true", True),
    ],
)
def test_the_hubs_own_offline_variable_counts(
    variable: str, value: str, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = install(monkeypatch)
    monkeypatch.setenv(variable, value)
    assert main(["generate", "m", "-p", "hi"]) == 0
    assert script.options["offline"] is offline


def test_json_is_one_object_on_stdout(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert main(["generate", "m", "-p", "hi", "--json", "--logprobs", "2"]) == 0
    out, err = capsys.readouterr()
    data: dict[str, Any] = json.loads(out)
    assert err == ""
    assert set(data) == {"text", "token_ids", "finish_reason", "logprobs", "stats", "model"}
    assert (data["text"], data["token_ids"], data["finish_reason"]) == ("Hello, world", [0, 1, 2], "stop")
    assert data["logprobs"][1] == {"token_id": 1, "logprob": -0.5, "top": [[1, -0.5], [99, None]]}
    assert set(data["stats"]) == {
        "prompt_tokens",
        "new_tokens",
        "prefill_seconds",
        "decode_seconds",
        "time_to_first_token",
        "reused_tokens",
        "preemptions",
        "proposed_tokens",
        "accepted_tokens",
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "peak_memory_bytes",
        "peak_cuda_memory_bytes",
    }
    assert data["model"] == {"name": "m", "family": "fake", "layers": 2, "weights_bytes": 1 << 20}


def test_logprobs_are_shown_a_token_a_line_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    main(["generate", "m", "-p", "hi", "--logprobs", "1"])
    out, err = capsys.readouterr()
    assert out == "Hello, world\n"
    assert err.splitlines()[1] == "1:'t1' -0.500  |  0:'t0' -0.500".replace("0:'t0'", "1:'t1'")


def test_ctrl_c_keeps_the_text_so_far_closes_the_request_and_exits_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = install(monkeypatch, answers=[["Hel", INTERRUPT, "lo"]])
    assert main(["generate", "m", "-p", "hi"]) == 130
    out, err = capsys.readouterr()
    assert out == "Hel\n"
    assert "Traceback" not in err
    assert script.closed == 1


def test_ctrl_c_under_json_still_prints_one_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, answers=[["Hel", INTERRUPT]])
    assert main(["generate", "m", "-p", "hi", "--json"]) == 130
    data = json.loads(capsys.readouterr().out)
    assert (data["text"], data["finish_reason"], data["stats"]) == ("Hel", "abort", None)


def test_a_real_interrupt_exits_130() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.fake", '{"answers": [["Hel", "<slow>"]]}', "generate", "m", "-p", "hi"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(3) == "Hel"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "\n", "")


def test_an_error_under_way_keeps_the_text_and_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, answers=[ValueError("prompt has 9 tokens, the context holds 8")])
    assert main(["generate", "m", "-p", "hi"]) == 1
    assert capsys.readouterr().err == "flexdecode: error: prompt has 9 tokens, the context holds 8\n"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"from a pipe\n", "from a pipe"),
        (b"two\nlines\r\n", "two\nlines"),
        (b"kept\n\n", "kept\n"),
        (b"", ""),
        ("naïve 🙂".encode(), "naïve 🙂"),
        (b"bad \xff\xfe byte", "bad \ufffd\ufffd byte"),
        (b"cut \xe2\x82", "cut \ufffd"),
    ],
)
@pytest.mark.parametrize("source", ["stdin", "file", "file -"])
def test_prompts_from_stdin_and_files(
    data: bytes,
    expected: str,
    source: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = install(monkeypatch)
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    path = tmp_path / "prompt.txt"
    path.write_bytes(data)
    flags = {"stdin": ["-p", "-"], "file": ["-f", str(path)], "file -": ["-f", "-"]}[source]
    assert main(["generate", "m", "--raw", *flags]) == 0
    assert script.calls[0][1] == expected
    assert ("not UTF-8" in capsys.readouterr().err) == ("\ufffd" in expected)


def test_a_prompt_argument_of_broken_bytes_is_cleaned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python turns the undecodable bytes of an argument into lone surrogates, which no tokenizer takes."""
    script = install(monkeypatch)
    assert main(["generate", "m", "-p", "a\udcffb", "--system", "\ud800", "--stop", "\udc80"]) == 0
    _, messages, params = script.calls[0]
    assert messages[1]["content"] == "a\ufffdb"
    messages[0]["content"].encode("utf-8")
    params.stop[0].encode("utf-8")


def test_a_missing_prompt_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    assert main(["generate", "m", "-f", str(tmp_path / "absent.txt")]) == 1
    assert "absent.txt: No such file" in capsys.readouterr().err
