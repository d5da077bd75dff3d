"""The grid: prefill, decode and memory by batch size and length, a prompt of each length and as many new tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from flexdecode.benchmark import rounds
from flexdecode.benchmark.model import READ, STEP, Floor, check_context, facts
from flexdecode.benchmark.provenance import provenance
from flexdecode.benchmark.rounds import Times, Work
from flexdecode.benchmark.rows import FAILURES, Row, failure
from flexdecode.benchmark.session import Session
from flexdecode.llm import LLM
from flexdecode.memory import forget_peak, held_bytes, peak_bytes

_MOST_READS = 30  # of a cell, spread over its steps


def bench(llm: LLM, model: str, batches: Sequence[int], lengths: Sequence[int], repetitions: int) -> Iterator[Row]:
    """A row for each batch size and length, as it is measured. One that failed has `failure` and no times.

    `repetitions` are of the prefill; every decode step is timed. Raises ValueError where the model's context ends
    before the longest prompt and its answer.
    """
    longest = max(lengths)
    if min(lengths) < 4:
        raise ValueError(f"--lengths {min(lengths)}: decoding is timed from answers of 4 tokens on")
    check_context(llm, 2 * longest, f"--lengths {longest}, a prompt and an answer of that length,")
    for batch in batches:
        for length in lengths:
            row = {"benchmark": "grid", **facts(llm, model)}
            row |= {"batch": batch, "prefill_length": length, "decode_length": length}
            try:
                yield {**row, **_measured(llm, batch, length, repetitions)}
            except FAILURES as problem:
                yield {**row, **failure(problem)}


@torch.inference_mode()
def _measured(llm: LLM, batch: int, length: int, repetitions: int) -> Row:
    device = llm.engine.model.device
    floor = Floor(llm, length + length // 2, batch)
    forget_peak(device)
    seconds = []
    for _ in range(rounds.WARM_UP + repetitions - 1):
        with Session(llm.engine, length, 1, batch) as session:
            seconds.append(Work(session.until_first_tokens).seconds())
    with Session(llm.engine, length, length, batch) as session:
        seconds.append(Work(session.until_first_tokens).seconds())
        prefill = Times({"prefill": dict(enumerate(seconds[rounds.WARM_UP :]))})
        steps = session.steps_left - rounds.WARM_UP
        if steps < 1:
            raise ValueError(
                f"{batch} prompts take so many steps that the first answer ends before the last begins; ask for a "
                f"smaller batch or more than {length} tokens"
            )
        works = {STEP: Work(session.step), READ: Work(floor.reader, most=_MOST_READS)}
        decode = rounds.run(works, steps)
        held, peak = (_without(floor, nbytes) for nbytes in (held_bytes(device), peak_bytes(device)))
    return {
        **{f"prefill_{key}": value for key, value in prefill.spread("prefill").items()},
        "prefill_repetitions": repetitions,
        "prefill_tokens_per_second": batch * length / prefill.ms("prefill") * 1e3,
        **{f"step_{key}": value for key, value in decode.spread(STEP).items()},
        "decode_tokens_per_second": batch / decode.ms(STEP) * 1e3,
        **floor.columns(decode),
        "held_bytes": held,
        "peak_bytes": peak,
        **provenance(steps, rounds.WARM_UP),
    }


def _without(floor: Floor, nbytes: int | None) -> int | None:
    """Less what the benchmark itself holds in order to read it."""
    return None if nbytes is None else nbytes - floor.reader.held_bytes
