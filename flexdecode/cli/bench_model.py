"""`flexdecode bench prefill | decode | grid | latency | engine MODEL`: whole models, beside what the machine gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from flexdecode.cli.bench_report import ReportOptions
from flexdecode.cli.lists import numbers
from flexdecode.cli.options import EngineOptions, Json, Model
from flexdecode.cli.output import Bars
from flexdecode.cli.verb import option, verb

if TYPE_CHECKING:
    from flexdecode.benchmark.decode import Fill
    from flexdecode.llm import LLM

Row = dict[str, Any]


def _at_least(option: str, value: int, least: int = 1) -> int:
    if value < least:
        raise ValueError(f"--{option} {value} must be at least {least}")
    return value


def _with_model(model: str, engine: EngineOptions, bench: Callable[[LLM], Iterator[Row]]) -> Iterator[Row]:
    """The rows of `bench`; the model is loaded when the first is asked for."""
    with Bars() as bars:
        llm = engine.load(model, bars)
    yield from bench(llm)


@verb
def prefill(
    model: Model,
    engine: EngineOptions,
    report: ReportOptions,
    lengths: Annotated[str, option("--lengths", help="Tokens of prompts, separated by commas.")] = "1024,4096,16384",
    repetitions: Annotated[int, option("--repetitions", help="Timed prefills of each length.")] = 3,
    json: Json = False,
) -> None:
    sizes, count = numbers("lengths", lengths), _at_least("repetitions", repetitions)
    report.check()
    from flexdecode.benchmark.prefill import bench

    report.write(_with_model(model, engine, lambda llm: bench(llm, model, sizes, count)), json)


@verb
def decode(
    model: Model,
    engine: EngineOptions,
    report: ReportOptions,
    lengths: Annotated[
        str, option("--lengths", help="Tokens of context, separated by commas.")
    ] = "1024,2048,4096,8192,16384,32768",
    fill: Annotated[
        str,
        option("--fill", metavar="prefill|random", help="Whether keys come from a prefill or are drawn at random."),
    ] = "prefill",
    repetitions: Annotated[int, option("--repetitions", help="Timed steps at each length.")] = 20,
    json: Json = False,
) -> None:
    if fill not in ("prefill", "random"):
        raise ValueError(f"--fill {fill!r} is not known (known: prefill, random)")
    kind: Fill = "random" if fill == "random" else "prefill"
    sizes, count = numbers("lengths", lengths), _at_least("repetitions", repetitions)
    names = tuple(dict.fromkeys(name.strip() for name in engine.attention.split(",")))
    report.check()
    from flexdecode.benchmark.decode import Plan, bench

    def load(name: str) -> LLM:
        with Bars() as bars:
            return replace(engine, attention=name).load(model, bars)

    report.write(bench(Plan(model, names, tuple(sizes), count, kind), load), json)


@verb
def grid(
    model: Model,
    engine: EngineOptions,
    report: ReportOptions,
    batch: Annotated[str, option("--batch", help="Sequences at once, separated by commas.")] = "1",
    lengths: Annotated[
        str, option("--lengths", help="Tokens of prompts and, as many, of answers, separated by commas.")
    ] = "32,64,128,256,512,1024,2048,4096",
    repetitions: Annotated[int, option("--repetitions", help="Timed prefills; every decode step is timed.")] = 3,
    json: Json = False,
) -> None:
    sizes, batches, count = numbers("lengths", lengths), numbers("batch", batch), _at_least("repetitions", repetitions)
    report.check()
    from flexdecode.benchmark.grid import bench

    report.write(_with_model(model, engine, lambda llm: bench(llm, model, batches, sizes, count)), json)


@verb
def latency(
    model: Model,
    engine: EngineOptions,
    report: ReportOptions,
    batch_size: Annotated[int, option("--batch-size", help="Prompts at once.")] = 1,
    prompt: Annotated[int, option("--input", help="Tokens of each prompt.")] = 1024,
    answer: Annotated[int, option("--output", help="Tokens of each answer.")] = 128,
    repetitions: Annotated[int, option("--repetitions", help="Timed batches.")] = 5,
    json: Json = False,
) -> None:
    _at_least("batch-size", batch_size)
    _at_least("input", prompt)
    count = _at_least("repetitions", repetitions)
    report.check()
    from flexdecode.benchmark.latency import Task, bench

    task = Task(batch_size, prompt, answer)
    report.write(_with_model(model, engine, lambda llm: bench(llm, model, task, count)), json)


@verb
def engine(
    model: Model,
    engine: EngineOptions,
    report: ReportOptions,
    running: Annotated[int, option("--running", help="Requests at once.")] = 64,
    prompt: Annotated[int, option("--input", help="Tokens of each prompt.")] = 512,
    answer: Annotated[int, option("--output", help="Tokens of each answer.")] = 128,
    known: Annotated[int, option("--known", help="Tokens of the prompt that is found in the cache.")] = 4096,
    repetitions: Annotated[int, option("--repetitions", help="Timed rounds.")] = 3,
    json: Json = False,
) -> None:
    _at_least("running", running)
    _at_least("input", prompt)
    _at_least("output", answer, 2)
    _at_least("known", known)
    if report.plot is not None:
        raise ValueError(
            f"--plot {report.plot}: these rows compare works, and there is no context to draw them against"
        )
    count = _at_least("repetitions", repetitions)
    report.check()
    from flexdecode.benchmark.engine import Load, bench

    load = Load(running, prompt, answer, known)
    report.write(_with_model(model, engine, lambda llm: bench(llm, model, load, count)), json)


COMMANDS = (
    ("prefill", "Prefills beside the products that they must make.", prefill),
    ("decode", "Decoding by length of context; --attention sdpa,flex,cpu sets backends beside each other.", decode),
    ("grid", "Prefill, decode and memory by batch size and length.", grid),
    ("latency", "Whole answers: median latency and throughput, prefill and decode.", latency),
    ("engine", "Many requests at once, the engine's own cost, known prompts, guessed tokens.", engine),
)
