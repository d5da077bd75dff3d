"""Attention alone: each case against the reference first, then in turn with what the machine gives and with others.

Decoding must read every visible key and value once, so its ceiling is the rate of the same threads' plain reads.
Prefill must multiply, so its ceiling is the rate of a bf16 product by torch. `times_X` is X's time over ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from flexdecode.attention.backends.cpu import Cpu
from flexdecode.attention.backends.flex import Flex
from flexdecode.attention.backends.sdpa import Sdpa
from flexdecode.benchmark import rounds
from flexdecode.benchmark.cases import Case
from flexdecode.benchmark.ceilings import Gemm, Reader
from flexdecode.benchmark.check import check, error_of_rounding
from flexdecode.benchmark.inputs import Inputs, build, needed_bytes
from flexdecode.benchmark.planning import Planner
from flexdecode.benchmark.provenance import provenance
from flexdecode.benchmark.rounds import Times, Work
from flexdecode.benchmark.rows import Row, each
from flexdecode.kernels import ops

_OURS = "attention"
_LAYERS = 16  # of the step in which a plan's share is told
_MOST_SECONDS = 10.0  # for all calls of one work


def bench(cases: Sequence[Case], repetitions: int, threads: Sequence[int]) -> Iterator[Row]:
    """A row for each number of threads and case (see rows.each). Raises ValueError where there are no kernels."""
    reason = ops.attend_unsupported("cpu", torch.bfloat16, torch.bfloat16) if cases else None
    if reason is not None:
        raise ValueError(f"there are no kernels to measure: {reason}")
    return each(cases, threads, lambda case: _measured(case, repetitions), needed_bytes)


@torch.inference_mode()
def _measured(case: Case, repetitions: int) -> Row:
    inputs = build(case)
    out = inputs.attend(Cpu())
    checked = check(inputs, out)
    found: Row = {"error": checked.error if math.isfinite(checked.error) else None, "checked_rows": checked.rows}
    if checked.failure is not None:
        return {"failure": checked.failure, **found, **provenance(0, 0)}
    if case.kv_dtype == torch.int8:
        found["error_to_fp32"] = error_of_rounding(inputs, out)
    measure = _plan if case.kernel == "plan" else _attention
    times, figures = measure(inputs, repetitions)
    count = len(times.of(case.kernel))
    return {**found, **figures, **provenance(count, rounds.WARM_UP)}


def _plan(inputs: Inputs, repetitions: int) -> tuple[Times, Row]:
    """A plan beside one layer's attention under it."""
    planner = Planner(inputs.case, repetitions)
    works = {
        "plan": planner.one_more(),
        "fresh_plan": planner.from_nothing(),
        _OURS: Work(inputs.attention(Cpu())),
    }
    times = rounds.run(works, repetitions, _MOST_SECONDS)
    share = times.ratio("plan", _OURS)
    return times, {
        **times.spread("plan"),
        "fresh_plan_ms": times.ms("fresh_plan"),
        "attention_ms": times.ms(_OURS),
        "share_of_layer": share,
        f"share_of_{_LAYERS}_layers": share / _LAYERS,
    }


def _attention(inputs: Inputs, repetitions: int) -> tuple[Times, Row]:
    case = inputs.case
    twins = {name: build(twin) for name, twin in case.twins}
    ceiling: Gemm | Reader = Gemm() if case.multiplies else Reader(inputs.visible_bytes())
    works = {_OURS: Work(inputs.attention(Cpu()))}
    # A plan is slower behind another work than behind another plan. In this order, forwards and backwards, each of them
    # runs as often behind an attention as behind the ceiling.
    if case.planned:
        works["plan"] = Planner(case, repetitions).one_more()
    works["ceiling"] = Work(ceiling)
    works |= {name: Work(_other(inputs, name)) for name in case.beside}
    for name, twin in twins.items():
        if case.planned:
            works[f"{name}_plan"] = Planner(twin.case, repetitions).one_more()
        works[name] = Work(twin.attention(Cpu()))
    times = rounds.run(works, repetitions, _MOST_SECONDS)
    figures = times.spread(_OURS) | _fraction(inputs, ceiling, times)
    for name in (*case.beside, *twins):
        figures |= {
            f"{name}_ms": times.ms(name),
            f"{name}_repetitions": len(times.of(name)),
            f"times_{name}": times.ratio(name, _OURS),
        }
    for name, twin in twins.items():
        figures |= _twin(inputs, twin, name, times)
    return times, figures


def _other(inputs: Inputs, name: str) -> Callable[[], Tensor]:
    """Another implementation on the same inputs. Raises ValueError where it computes something else."""
    if name == "sdpa":
        call = inputs.torch_sdpa()
    else:
        call = inputs.attention(Sdpa() if name == "sdpa_folded" else Flex())
    if name == "flex":  # the first call compiles, which is no warming up
        checked = check(inputs, call())
        if checked.failure is not None:
            raise ValueError(f"{name}: {checked.failure}")
    return call


def _fraction(inputs: Inputs, ceiling: Gemm | Reader, times: Times) -> Row:
    """The work that must be done, its rate, the ceiling's rate in the same rounds and the fraction reached."""
    per_ms, alone = times.ms(_OURS) * 1e6, times.ms("ceiling") * 1e6
    quicker = times.ratio("ceiling", _OURS)
    if isinstance(ceiling, Reader):
        count, most, unit = inputs.visible_bytes(), ceiling.nbytes, "gb_per_s"
        amount: Row = {"bytes": count}
    else:
        count, most, unit = inputs.flops(), ceiling.flops, "gflop_per_s"
        amount = {"flops": count, "torch_products": ops.use_torch_products()}
    return {
        **amount,
        unit: count / per_ms,
        f"ceiling_{unit}": most / alone,
        "fraction": quicker * count / most,
    }


def _twin(inputs: Inputs, twin: Inputs, name: str, times: Times) -> Row:
    """What a twin had to do, its own error, and both with their plans where those were timed."""
    case = inputs.case
    found: Row = {f"{name}_flops": twin.flops()} if case.multiplies else {f"{name}_bytes": twin.visible_bytes()}
    if case.kv_dtype == torch.int8:
        found[f"{name}_error_to_fp32"] = error_of_rounding(twin, twin.attend(Cpu()))
    if case.planned:
        both = times.ratio_of_sums([name, f"{name}_plan"], [_OURS, "plan"])
        found |= {
            "plan_ms": times.ms("plan"),
            f"{name}_plan_ms": times.ms(f"{name}_plan"),
            f"times_{name}_planned": both,
        }
    return found
