"""`flexdecode bench …`: measurements. Each states its ceiling and the fraction reached."""

from __future__ import annotations

from typing import Annotated

import typer

from flexdecode.cli import machine
from flexdecode.cli.options import EngineOptions, Json, Model
from flexdecode.cli.output import Bars, print_report, write_json, write_text
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


@app.command("kernels", help="Decode attention against its reference and against the rate at which memory is read.")
@verb
def kernels(
    lengths: Annotated[str, option("--lengths", help="Keys, separated by commas.")] = "4096,32768,131072",
    head_dims: Annotated[str, option("--head-dims", help="Sizes of a head, separated by commas.")] = "64,80,96,128,256",
    groups: Annotated[str, option("--groups", help="Query heads a kv head, separated by commas.")] = "1,3,4,7,8",
    repetitions: Annotated[int, option("--repetitions", help="Timed calls.")] = 20,
    threads: Annotated[int | None, option("--threads", help="CPU threads; torch's choice by default.")] = None,
    json: Json = False,
) -> None:
    numbers = [
        _numbers(name, text) for name, text in (("lengths", lengths), ("head-dims", head_dims), ("groups", groups))
    ]
    import torch

    from flexdecode.benchmark.kernels import bench_decode, decode_cases

    if threads is not None:
        torch.set_num_threads(threads)
    for row in bench_decode(decode_cases(*numbers), repetitions):
        if json:
            write_json({"cpu": machine.cpu()["model"], **row}, indent=None)
        else:
            write_text(
                f"{row['kernel']}: {row['ms']:.2f} ms, {row['gb_per_s']:.1f} of {row['read_gb_per_s']:.1f} GB/s "
                f"({row['fraction_of_read']:.0%}), {row['times_sdpa']:.0f} x sdpa, error {row['error']:.1e}\n"
            )


def _numbers(name: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--{name} {text!r} is not a list of whole numbers such as 1024,4096") from None
    if min(found) < 1:
        raise ValueError(f"--{name} {text!r} holds a number below 1")
    return found
