"""`flexdecode bench …`: measurements. Each states its ceiling and the fraction reached."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any

import typer

from flexdecode.cli import bench_model
from flexdecode.cli.bench_report import Out, RowFile
from flexdecode.cli.lists import numbers, shapes_of
from flexdecode.cli.options import EngineOptions, Json, Model
from flexdecode.cli.output import Bars, print_report, write_json, write_text
from flexdecode.cli.verb import option, verb

NAME = "bench"
HELP = "Measure speed on this machine."

app = typer.Typer(help=HELP, no_args_is_help=True)
for _name, _help, _command in bench_model.COMMANDS:
    app.command(_name, help=_help)(_command)


@app.command("step", help="Where the time of a decode step goes: by operator, beside its floor and its products alone.")
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
        row = measure(llm, str(model), context, repetitions)
    if json:
        write_json(row)
    else:
        print_report(row, f"{model}: one step at {context} tokens of context")


@app.command("transformers", help="A decode step of a transformers model, with its own attention and with ours.")
@verb
def transformers(
    shape: Annotated[
        str, typer.Argument(metavar="SHAPE", help="Random weights in a known shape, such as llama-3.2-1b.")
    ] = "llama-3.2-1b",
    context: Annotated[int, option("--context", help="Tokens in the static cache.")] = 16384,
    repetitions: Annotated[int, option("--repetitions", help="Timed steps.")] = 10,
    threads: Annotated[
        int | None, option("--threads", help="CPU threads; torch's choice by default.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    if context < 1 or repetitions < 1:
        raise ValueError(f"--context {context} and --repetitions {repetitions} must both be at least 1")
    import torch

    from flexdecode.benchmark.hosted import measure

    if threads is not None:
        torch.set_num_threads(threads)
    row = measure(shape, context, repetitions)
    if json:
        write_json(row)
    else:
        print_report(row, f"{shape} in transformers: one step at {context} tokens of context")


@app.command("kernels", help="Attention and products alone: against references, and against what the machine gives.")
@verb
def kernels(
    only: Annotated[
        str, option("--only", help="Sections, separated by commas.")
    ] = "decode,int8,masks,plan,prefill,verify,int4,int8-weights,dense",
    lengths: Annotated[
        str, option("--lengths", help="Keys, separated by commas.")
    ] = "4096,8192,16384,32768,65536,131072",
    head_dims: Annotated[str, option("--head-dims", help="Sizes of a head, separated by commas.")] = "64,80,96,128,256",
    groups: Annotated[str, option("--groups", help="Query heads a kv head, separated by commas.")] = "1,3,4,7,8",
    shapes: Annotated[
        str, option("--shapes", metavar="NxK,…", help="Weights of products, outputs x inputs, separated by commas.")
    ] = "4096x4096,14336x4096,4096x14336,128256x2048",
    group_sizes: Annotated[
        str, option("--group-sizes", help="Inputs that share a scale in int4, separated by commas.")
    ] = "32,64,128",
    rows: Annotated[
        str, option("--rows", help="Rows of activations of a product, separated by commas.")
    ] = "1,2,4,8,16,64,512",
    repetitions: Annotated[int, option("--repetitions", help="Timed calls.")] = 20,
    threads: Annotated[
        str, option("--threads", metavar="all|N,…", help="CPU threads; torch's choice by default.")
    ] = "all,1",
    out: Out = None,
    json: Json = False,
) -> None:
    if repetitions < 1:
        raise ValueError(f"--repetitions {repetitions} must be at least 1")
    axes = (numbers("lengths", lengths), numbers("head-dims", head_dims), numbers("groups", groups))
    weights = (shapes_of(shapes), numbers("group-sizes", group_sizes), numbers("rows", rows))
    import torch

    from flexdecode.benchmark import kernels, products
    from flexdecode.benchmark.cases import cases

    every = "all" in threads.split(",")
    counts = numbers("threads", threads.replace("all", str(torch.get_num_threads())) if every else threads)
    counts = list(dict.fromkeys(counts))
    attention, linear = cases(only.split(","), *axes), products.cases(only.split(","), *weights)
    failed = 0
    with RowFile(out) as file:
        told = _Rows(file, json)
        measured = (kernels.bench(attention, repetitions, counts), products.bench(linear, repetitions, counts))
        for row in chain.from_iterable(measured):
            failed += "failure" in row
            told.add(row)
    if failed:
        raise ValueError(f"{failed} of {told.count} rows failed; each says why")


class _Rows:
    """Rows as they are measured: to stdout as a table or as lines of JSON, and to a file."""

    def __init__(self, file: RowFile, json: bool) -> None:
        self._file, self._json = file, json
        self._heading = ""
        self.count = 0

    def add(self, row: dict[str, Any]) -> None:
        from flexdecode.benchmark.report import json_line
        from flexdecode.benchmark.table import heading, line

        self.count += 1
        self._file.add(json_line(row))
        if self._json:
            write_json(row, indent=None)
            return
        if heading(row) != self._heading:
            write_text(("\n" if self._heading else "") + heading(row) + "\n")
            self._heading = heading(row)
        write_text(line(row) + "\n")
