"""`flexdecode batch MODEL IN.jsonl OUT.jsonl`: many requests, a line each, answered together.

A line of OUT is written when its answer ends, so OUT has an order of its own. A run that was stopped goes on where it
was, with the same command: see cli/ledger.py. What a line may ask is in cli/rows.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from flexdecode.cli.intake import Known, lines, opened, refuse_one_file, scan
from flexdecode.cli.ledger import Ledger, Stdout, Writer
from flexdecode.cli.options import OUTPUT, EngineOptions, Json, Model, SamplingOptions, Speculate
from flexdecode.cli.output import Bars, write_json
from flexdecode.cli.rows import Key, Line, answer_row, error_row, job_of
from flexdecode.cli.tally import Tally
from flexdecode.cli.text import note
from flexdecode.cli.verb import option, verb

if TYPE_CHECKING:
    from flexdecode.generation.params import SamplingParams
    from flexdecode.jobs import Finished, Job
    from flexdecode.llm import LLM

NAME = "batch"
HELP = "Answer a file of requests, one JSON object a line."


@verb
def command(
    model: Model,
    source: Annotated[str, typer.Argument(metavar="IN", help="Requests as JSON lines; - reads stdin.")],
    target: Annotated[
        str, typer.Argument(metavar="OUT", help="Answers as JSON lines, added to what is there; - writes to stdout.")
    ],
    sampling: SamplingOptions,
    engine: EngineOptions,
    retry_errors: Annotated[
        bool, option("--retry-errors", help="Try again the lines that failed in an earlier run.", panel=OUTPUT)
    ] = False,
    speculate: Speculate = "off",
    json: Json = False,
) -> None:
    if target == "-" and (json or retry_errors):
        flag, why = ("--json", "the summary to stdout") if json else ("--retry-errors", "again what OUT holds")
        raise typer.BadParameter(f"{flag} writes {why}, and OUT is stdout; leave it out, or name a file")
    defaults = sampling.params()
    refuse_one_file(source, target)
    with opened(source) as file:
        known = scan(file, source)
        if target == "-":
            run = Run(model, engine, defaults, source, known, Stdout(), Tally(len(known)), frozenset(), speculate)
            run.answer(file, quiet=sys.stdout.isatty())
        else:
            with Ledger(Path(target), source, known, retry_errors) as out:
                tally = Tally(len(known), skipped=len(out.done), failed_before=len(out.failed))
                run = Run(model, engine, defaults, source, known, out, tally, out.done | out.failed, speculate)
                run.answer(file)
    if json:
        write_json(run.tally.as_data(), indent=None)
    else:
        note(run.tally.line())
    _end(run, target)


def _end(run: Run, target: str) -> None:
    tally = run.tally
    if run.stopped:
        again = "" if target == "-" else "; the same command goes on from here"
        note(f"stopped: {tally.left} of {tally.lines} lines are not answered{again}")
        raise typer.Exit(130)
    failed = tally.failed + tally.failed_before
    if failed:
        before = (
            f" ({tally.failed_before} in an earlier run; --retry-errors tries again)" if tally.failed_before else ""
        )
        raise ValueError(f"{failed} of {tally.lines} lines failed{before}; their rows say why")


@dataclass
class Run:
    """One pass over the lines: those in `over` are left out, the others answered, each row written as it ends."""

    model: str
    engine: EngineOptions
    defaults: SamplingParams
    source: str
    known: Known
    out: Writer
    tally: Tally
    over: frozenset[Key] | set[Key]
    speculate: str = "off"
    stopped: bool = False

    def answer(self, file: IO[bytes], quiet: bool = False) -> None:
        """Ctrl-C ends it, with `stopped` set; the model is not loaded where nothing is left to do."""
        if not self.tally.left:
            return
        try:
            with Bars() as bars:

                def loading(kind: str, done: int, total: int) -> None:
                    if kind == "load":  # prompts are read among answers here, which have a bar of their own
                        bars(kind, done, total)

                llm = self.engine.load(self.model, loading, self.speculate)
                self._run(llm, file, None if quiet else bars)
        except KeyboardInterrupt:
            self.stopped = True

    def _run(self, llm: LLM, file: IO[bytes], bars: Bars | None) -> None:
        tally, start, total = self.tally, time.perf_counter(), self.tally.left
        try:
            if bars is not None:
                bars("lines", 0, total)
            for finished in llm.complete(self._jobs(file)):
                self._write(finished, llm)
                tally.seconds = time.perf_counter() - start
                if bars is not None:
                    bars("lines", total - tally.left, total, f", {tally.rate:,.0f} tok/s")
        finally:
            tally.seconds = time.perf_counter() - start

    def _jobs(self, file: IO[bytes]) -> Iterator[Job]:
        """The lines that are to be answered; one that asks nothing that can be served gets its row at once."""
        seen = 0
        for line in lines(file):
            seen += 1
            if self.known.get(line.key) != (line.number, line.digest):
                raise ValueError(f"{self.source}:{line.number} has changed since it was first read; run it again")
            if line.key in self.over:
                continue
            try:
                job = job_of(line, self.defaults)
            except ValueError as error:
                self._fail(line, error)
            else:
                yield job
        if seen != len(self.known):
            raise ValueError(f"{self.source} had {len(self.known)} lines and has {seen} now; run it again")

    def _write(self, finished: Finished, llm: LLM) -> None:
        line: Line = finished.job.key
        if finished.error is not None:
            self._fail(line, finished.error)
            return
        completions = finished.completions
        self.out.write(answer_row(line, finished.job, completions, llm, self.model))
        self.tally.answered += 1
        self.tally.prompt_tokens += sum(one.prompt_tokens for one in completions[:: finished.job.params.n])
        self.tally.new_tokens += sum(len(one.token_ids) for one in completions)

    def _fail(self, line: Line, error: ValueError) -> None:
        self.out.write(error_row(line, error))
        self.tally.failed += 1
