"""`flexdecode bench …`: measurements. Each states its ceiling and the fraction reached."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from flexdecode.cli.options import EngineOptions, Json, Model
from flexdecode.cli.output import Bars, print_report, write_json, write_text
from flexdecode.cli.text import note
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
        row = {"model": model, **measure(llm, context, repetitions)}
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


@app.command("kernels", help="Attention alone: against its reference, against what the machine gives, beside others.")
@verb
def kernels(
    only: Annotated[
        str, option("--only", help="Sections, separated by commas.")
    ] = "decode,int8,masks,plan,prefill,verify",
    lengths: Annotated[
        str, option("--lengths", help="Keys, separated by commas.")
    ] = "4096,8192,16384,32768,65536,131072",
    head_dims: Annotated[str, option("--head-dims", help="Sizes of a head, separated by commas.")] = "64,80,96,128,256",
    groups: Annotated[str, option("--groups", help="Query heads a kv head, separated by commas.")] = "1,3,4,7,8",
    repetitions: Annotated[int, option("--repetitions", help="Timed calls.")] = 20,
    threads: Annotated[
        str, option("--threads", metavar="all|N,…", help="CPU threads; torch's choice by default.")
    ] = "all,1",
    out: Annotated[
        Path | None,
        option("--out", help="Write the rows here, too; a whole run replaces the file.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    if repetitions < 1:
        raise ValueError(f"--repetitions {repetitions} must be at least 1")
    axes = (_numbers("lengths", lengths), _numbers("head-dims", head_dims), _numbers("groups", groups))
    import torch

    from flexdecode.benchmark.cases import cases
    from flexdecode.benchmark.kernels import bench

    every = "all" in threads.split(",")
    counts = _numbers("threads", threads.replace("all", str(torch.get_num_threads())) if every else threads)
    chosen = cases(only.split(","), *axes)
    failed = 0
    with _Rows(out, json) as rows:
        for row in bench(chosen, repetitions, list(dict.fromkeys(counts))):
            failed += "failure" in row
            rows.add(row)
    if failed:
        raise ValueError(f"{failed} of {rows.count} rows failed; each says why")


class _Rows:
    """Where rows go as they are measured: to stdout as a table or as lines of JSON, and to a file.

    The file is written under a name ending in .part, which a run that ends well takes away; one that does not leaves
    the rows that it has measured there.
    """

    def __init__(self, path: Path | None, json: bool) -> None:
        self._path, self._json = path, json
        self._part = None if path is None else path.with_name(path.name + ".part")
        self._file = None if self._part is None else self._part.open("w", encoding="utf-8")
        self._heading = ""
        self.count = 0

    def add(self, row: dict[str, Any]) -> None:
        from flexdecode.benchmark.table import heading, line

        self.count += 1
        if self._file is not None:
            self._file.write(dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        if self._json:
            write_json(row, indent=None)
            return
        if heading(row) != self._heading:
            write_text(("\n" if self._heading else "") + heading(row) + "\n")
            self._heading = heading(row)
        write_text(line(row) + "\n")

    def __enter__(self) -> _Rows:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is None or self._part is None or self._path is None:
            return
        self._file.close()
        if kind is None:
            self._part.replace(self._path)
        else:
            note(f"broken off: the rows measured so far ({self.count}) are in {self._part}")


def _numbers(name: str, text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--{name} {text!r} is not a list of whole numbers such as 1024,4096") from None
    if min(found) < 1:
        raise ValueError(f"--{name} {text!r} holds a number below 1")
    return found
