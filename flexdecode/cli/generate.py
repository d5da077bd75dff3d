"""`flexdecode generate MODEL -p PROMPT`: one prompt, one answer.

The answer goes to stdout as it grows, with one newline after it; figures go to stderr. `--json` prints one object.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexdecode.cli.answer import as_data, receive, stats_line
from flexdecode.cli.explain import (
    Watch,
    explain,
    explanation_data,
    explanation_lines,
    has_chat_template,
    last_step,
)
from flexdecode.cli.options import EngineOptions, Json, Model, SamplingOptions, Speculate, Verbose
from flexdecode.cli.output import Bars, write_json, write_text
from flexdecode.cli.text import clean, note, read_prompt
from flexdecode.cli.verb import option, verb

if TYPE_CHECKING:
    from flexdecode.cli.answer import Answer
    from flexdecode.generation.params import SamplingParams
    from flexdecode.generation.results import Chunk
    from flexdecode.llm import LLM

NAME = "generate"
HELP = "Answer one prompt."


@verb
def command(
    model: Model,
    sampling: SamplingOptions,
    engine: EngineOptions,
    prompt: Annotated[
        str | None, option("--prompt", "-p", metavar="TEXT", help="The prompt; - reads stdin.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None, option("--file", "-f", metavar="FILE", help="Read the prompt from a file.", show_default=False)
    ] = None,
    system: Annotated[
        str | None, option("--system", metavar="TEXT", help="System message before the prompt.", show_default=False)
    ] = None,
    raw: Annotated[
        bool,
        option(
            "--raw", help="Give the prompt as it is, without the chat template that is used when the model has one."
        ),
    ] = False,
    logprobs: Annotated[
        int | None,
        option(
            "--logprobs",
            metavar="N",
            help="Log-probability of each token, and of the N likeliest (0 to 20).",
            show_default=False,
        ),
    ] = None,
    explain_step: Annotated[
        bool,
        option("--explain", help="Say what the last step read, the floor that this sets, and the time taken."),
    ] = False,
    speculate: Speculate = "off",
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    if raw and system is not None:
        raise typer.BadParameter("--system is part of a chat template, and --raw uses none; leave one of them out")
    params = sampling.params(logprobs)
    text = read_prompt(prompt, file)
    system = None if system is None else clean(system, "--system")
    with Bars() as bars:
        llm = engine.load(model, bars, speculate)
        chat = not raw and (system is not None or has_chat_template(llm))
        if verbose:
            explain(llm, params, chat)
        watch = Watch(_start(llm, text, system, params, chat))
        answer = receive(iter(watch), _writer(bars, silent=json))
    _finish(answer, llm, model, json, logprobs is not None, watch if explain_step else None)


def _start(llm: LLM, text: str, system: str | None, params: SamplingParams, chat: bool) -> Iterator[Chunk]:
    if not chat:
        return llm.stream(text, params)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return llm.stream_chat([*messages, {"role": "user", "content": text}], params)


def _writer(bars: Bars, silent: bool) -> Any:
    def write(text: str) -> None:
        bars.close()
        if not silent:
            write_text(text)

    return write


def _finish(answer: Answer, llm: LLM, model: str, json: bool, with_logprobs: bool, watch: Watch | None) -> None:
    if json:
        data = {**as_data(answer), "model": {"name": model, **llm.describe()}}
        if watch is not None:
            data["explanation"] = explanation_data(last_step(llm, answer.stats), watch.median_seconds)
        write_json(data, indent=None)
    else:
        write_text("\n")
        if with_logprobs:
            for line in logprob_lines(answer, llm):
                note(line)
        if answer.stats is not None:
            note(stats_line(answer.stats))
        if watch is not None and not answer.interrupted:
            for line in explanation_lines(last_step(llm, answer.stats), watch.median_seconds):
                note(line)
    if answer.interrupted:
        raise typer.Exit(130)


def logprob_lines(answer: Answer, llm: LLM) -> Iterator[str]:
    """One line a token: its text, its natural-log probability, and the likeliest alternatives."""
    for entry in answer.logprobs or ():
        others = "".join(f"  {_piece(llm, token_id)} {logprob:.3f}" for token_id, logprob in entry.top)
        yield f"{_piece(llm, entry.token_id)} {entry.logprob:.3f}" + (f"  |{others}" if others else "")


def _piece(llm: LLM, token_id: int) -> str:
    if llm.tokenizer is None:
        return str(token_id)
    return f"{token_id}:{llm.tokenizer.decode([token_id], skip_special_tokens=False)!r}"
