"""The command line's surface, frozen: a flag appears or goes away only together with a line here."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from flexdecode.cli.main import app

PROGRAM = {"--version", "--debug", "--install-completion", "--show-completion", "--help", "-h"}
ENGINE = {
    "--dtype",
    "--kv-dtype",
    "--device",
    "--attention",
    "--mask",
    "--replace-mask",
    "--max-context",
    "--kv-memory",
    "--ignore-memory",
    "--batch-invariant",
    "--threads",
    "--revision",
    "--offline",
    "--ignore-config",
}
SAMPLING = {
    "--max-tokens",
    "-n",
    "--temperature",
    "--temp",
    "--top-k",
    "--top-p",
    "--min-p",
    "--repetition-penalty",
    "--presence-penalty",
    "--frequency-penalty",
    "--logit-bias",
    "--seed",
    "--stop",
    "--stop-token-id",
    "--ignore-eos",
}
SPECULATION = {"--speculate"}
EVALUATION = {"--text", "--limit", "--out", "-o"}
EVERY_VERB = {"--debug", "--json"}
OUTPUT = {"--verbose", "-v"}
REPORT = {"--format", "-o", "--out", "--plot"}
VERBS = {
    "generate": ENGINE
    | SAMPLING
    | OUTPUT
    | SPECULATION
    | {"--prompt", "-p", "--file", "-f", "--system", "--raw", "--logprobs", "--explain"},
    "chat": ENGINE | SAMPLING | OUTPUT | SPECULATION | {"--system", "--overflow"},
    "batch": ENGINE | SAMPLING | SPECULATION | {"--retry-errors"},
    "mask": {"--length", "--at", "--heads", "--head", "--png"},
    "inspect": {"--dtype", "--kv-dtype", "--max-context", "--measure", "--revision", "--offline", "--ignore-config"},
    "env": set(),
    "pull": {"--revision", "--offline"},
    "eval perplexity": ENGINE | EVALUATION | {"--context", "--stride"},
    "eval divergence": ENGINE | EVALUATION | {"--against", "--against-dtype", "--context"},
    "eval needle": ENGINE
    | (EVALUATION - {"--limit"})
    | {"--lengths", "--depths", "--trials", "--first-trial", "--png"},
    "quantize": {
        "--method",
        "--group-size",
        "--format",
        "--symmetric",
        "--skip",
        "--odd-widths",
        "--no-clip",
        "--next-inputs",
        "--data",
        "--dataset",
        "--split",
        "--column",
        "--samples",
        "--length",
        "--seed",
        "--dry-run",
        "--resume",
        "--dtype",
        "--device",
        "--threads",
        "--png",
        "--revision",
        "--offline",
        "--ignore-config",
    }
    | OUTPUT,
    "bench transformers": {"--context", "--repetitions", "--threads"},
    "bench kernels": {"--only", "--lengths", "--head-dims", "--groups", "--shapes", "--group-sizes", "--rows"}
    | {"--repetitions", "--threads", "--out"},
    "bench step": ENGINE | {"--context", "--repetitions"},
    "bench prefill": ENGINE | REPORT | {"--lengths", "--repetitions"},
    "bench decode": ENGINE | REPORT | {"--lengths", "--fill", "--repetitions"},
    "bench grid": ENGINE | REPORT | {"--batch", "--lengths", "--repetitions"},
    "bench latency": ENGINE | REPORT | {"--batch-size", "--input", "--output", "--repetitions"},
    "bench engine": ENGINE | REPORT | {"--running", "--input", "--output", "--known", "--repetitions"},
}


def commands() -> dict[str, Any]:
    """Commands by name; those of a group under `group command`."""
    found: dict[str, Any] = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found |= {name: command} if inner is None else {f"{name} {key}": value for key, value in inner.items()}
    return found


def options(command: Any) -> list[Any]:
    return [parameter for parameter in command.params if parameter.param_type_name == "option"]


def test_no_new_verbs() -> None:
    assert set(commands()) == set(VERBS)


@pytest.mark.parametrize("name", VERBS)
def test_no_new_flags(name: str) -> None:
    flags = {flag for option in options(commands()[name]) for flag in [*option.opts, *option.secondary_opts]}
    assert flags == VERBS[name] | EVERY_VERB


def test_no_new_flags_before_the_verb() -> None:
    group: Any = typer.main.get_command(app)
    flags = {flag for option in options(group) for flag in [*option.opts, *option.secondary_opts]}
    assert flags | {"--help", "-h"} == PROGRAM


@pytest.mark.parametrize("name", VERBS)
def test_every_option_has_its_variable_and_a_help_text(name: str) -> None:
    for option in options(commands()[name]):
        long = next(flag for flag in option.opts if flag.startswith("--"))
        expected = "FLEXDECODE_" + long[2:].replace("-", "_").upper()
        names = [option.envvar] if isinstance(option.envvar, str) else option.envvar
        assert names == [expected, *(["HF_HUB_OFFLINE"] if long == "--offline" else [])]
        assert option.show_envvar
        assert option.help


@pytest.mark.parametrize("name", VERBS)
def test_shared_flags_read_alike_in_every_verb(name: str) -> None:
    ours = {flag: option.help for option in options(commands()[name]) for flag in option.opts}
    theirs = {flag: option.help for option in options(commands()["generate"]) for flag in option.opts}
    shared = set(ours) & set(theirs) - {"--system"}
    assert {flag: ours[flag] for flag in shared} == {flag: theirs[flag] for flag in shared}
