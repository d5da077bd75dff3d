"""`flexdecode bench …`: measurements. Each states its ceiling and the fraction reached."""

from __future__ import annotations

from typing import Annotated

import typer

from flexdecode.cli import machine
from flexdecode.cli.options import EngineOptions, Json, Model
from flexdecode.cli.output import Bars, print_report, write_json
from flexdecode.cli.verb import option, verb

NAME = "bench"
HELP = "Measure speed on this machine."

app = typer.Typer(help=HELP, no_args_is_help=True)


@app.command("step", help="Time one decode step beside its products run alone, in turn.")
@verb
def step(
    model: Model,
    engine: EngineOptions,
    context: Annotated[int, option("--context", help="Tokens in the cache when decoding is timed.")] = 128,
    repetitions: Annotated[int, option("--repetitions", help="Timed steps.")] = 40,
    json: Json = False,
) -> None:
    if context < 1 or repetitions < 1:
        raise ValueError(f"--context {context} and --repetitions {repetitions} must both be at least 1")
    from flexdecode.benchmark.step import measure

    with Bars() as bars:
        llm = engine.load(model, bars)
        row = {"model": model, "cpu": machine.cpu()["model"], **measure(llm, context, repetitions)}
    if json:
        write_json(row)
    else:
        print_report(row, f"{model}: one step at {context} tokens of context")
