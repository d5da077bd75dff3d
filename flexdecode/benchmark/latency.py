"""Latency of whole answers: prompts of one length, answers of one length, one batch after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flexdecode.benchmark import rounds
from flexdecode.benchmark.model import READ, Floor, check_context, facts
from flexdecode.benchmark.provenance import provenance
from flexdecode.benchmark.rounds import Times, Work
from flexdecode.benchmark.rows import FAILURES, Row, failure
from flexdecode.benchmark.session import Session
from flexdecode.llm import LLM


@dataclass(frozen=True)
class Task:
    """`batch` prompts of `prompt` tokens at once, each answered with `answer` tokens."""

    batch: int
    prompt: int
    answer: int

    def columns(self) -> Row:
        return {"batch": self.batch, "prefill_length": self.prompt, "decode_length": self.answer}


def bench(llm: LLM, model: str, task: Task, repetitions: int) -> Iterator[Row]:
    """One row. Raises ValueError where the model's context ends too soon, or an answer is too short to be timed."""
    if task.answer < 2:
        raise ValueError(f"--output {task.answer}: the first token belongs to the prefill; ask for at least 2")
    needed = task.prompt + task.answer
    check_context(llm, needed, f"--input {task.prompt} and --output {task.answer}")
    row = {"benchmark": "latency", **facts(llm, model), **task.columns()}
    try:
        yield {**row, **_measured(llm, task, repetitions)}
    except FAILURES as problem:
        yield {**row, **failure(problem)}


@torch.inference_mode()
def _measured(llm: LLM, task: Task, repetitions: int) -> Row:
    floor = Floor(llm, task.prompt + task.answer // 2, task.batch)
    read = Work(floor.reader)
    seconds: dict[str, dict[int, float]] = {"prefill": {}, "decode": {}, "total": {}, READ: {}}
    for i in range(-rounds.WARM_UP, repetitions):
        with Session(llm.engine, task.prompt, task.answer, task.batch) as session:
            prefill = Work(session.until_first_tokens).seconds()
            decode = Work(session.until_ended).seconds()
        reading = read.seconds()
        if i >= 0:
            each = {"prefill": prefill, "decode": decode, "total": prefill + decode, READ: reading}
            for name, value in each.items():
                seconds[name][i] = value
    times = Times(seconds)
    b, prompt, answer = task.batch, task.prompt, task.answer
    spreads: Row = {
        f"{name}_{key}": value for name in ("total", "prefill", "decode") for key, value in times.spread(name).items()
    }
    return {
        **spreads,
        "prefill_tokens_per_second": b * prompt / times.ms("prefill") * 1e3,
        "decode_tokens_per_second": b * (answer - 1) / times.ms("decode") * 1e3,
        "tokens_per_second": b * answer / times.ms("total") * 1e3,
        "total_tokens_per_second": b * (prompt + answer) / times.ms("total") * 1e3,
        **floor.columns(times, answer - 1, "decode"),
        **provenance(repetitions, rounds.WARM_UP),
    }
