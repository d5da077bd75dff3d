"""Products with weights alone: int4, int8 and dense, against fp64 first, then in turn with what the machine gives.

Up to 16 rows the weights must be read once, so the ceiling is the rate of the same threads' plain reads; more rows
must be multiplied, so it is the rate of a bf16 product by torch. `times_X` is X's time over ours, `over_one_row` ours
over our own for one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flexdecode.benchmark import rounds
from flexdecode.benchmark.cases import PRODUCTS
from flexdecode.benchmark.ceilings import GEMM, Gemm, Reader
from flexdecode.benchmark.matrices import TOLERANCE, Matrix, build, needed_bytes
from flexdecode.benchmark.provenance import provenance
from flexdecode.benchmark.rounds import Times, Work
from flexdecode.benchmark.rows import Row, each

_OURS = "product"
_FEW_ROWS = 16  # up to here reading is the work
_MOST_SECONDS = 10.0  # for all calls of one work
_TOGETHER = 64 << 20  # bytes that products of few rows read one after the other, as in a model
_WORK_BYTES = 1 << 30  # a reader or a product of the ceiling, activations and results
_KINDS = {"int4": "int4", "int8-weights": "int8", "dense": "dense"}


@dataclass(frozen=True)
class Product:
    """`rows` activations of `inputs` times weights of [outputs, inputs]."""

    section: str
    outputs: int
    inputs: int
    rows: int
    group_size: int | None = None

    @property
    def matrix(self) -> tuple[str, int, int, int | None]:
        return _KINDS[self.section], self.outputs, self.inputs, self.group_size

    @property
    def multiplies(self) -> bool:
        return self.rows > _FEW_ROWS

    def columns(self) -> Row:
        """What tells this case's row from others."""
        return {
            "section": self.section,
            "kernel": "product",
            "outputs": self.outputs,
            "inputs": self.inputs,
            "rows": self.rows,
            "group_size": self.group_size,
            "dtype": "bfloat16",
        }


def cases(
    only: Sequence[str], shapes: Sequence[tuple[int, int]], group_sizes: Sequence[int], rows: Sequence[int]
) -> list[Product]:
    """The cases of these sections: every shape (outputs, inputs), for int4 in every group size, and every number of
    rows. Raises ValueError where a group size does not divide a shape's inputs."""
    found = []
    for section in (name for name in PRODUCTS if name in only):
        for outputs, inputs in shapes:
            for size in group_sizes if section == "int4" else [None]:
                if size is not None and (inputs % size or inputs % 2):
                    raise ValueError(f"--group-sizes {size} does not divide the {inputs} inputs of {outputs}x{inputs}")
                found += [Product(section, outputs, inputs, count, size) for count in rows]
    return found


def bench(cases: Sequence[Product], repetitions: int, threads: Sequence[int]) -> Iterator[Row]:
    """A row for each number of threads and case (see rows.each). Neighbours of one matrix share it."""
    built: dict[tuple[str, int, int, int | None], Matrix] = {}

    def measured(case: Product) -> Row:
        if case.matrix not in built:
            built.clear()  # before the next one is made
            built[case.matrix] = build(*case.matrix)
        return _measured(case, built[case.matrix], repetitions)

    return each(cases, threads, measured, lambda case: needed_bytes(*case.matrix) + _WORK_BYTES)


@torch.inference_mode()
def _measured(case: Product, matrix: Matrix, repetitions: int) -> Row:
    x_MK = torch.randn(case.rows, case.inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours = matrix.ours()
    error, outputs = matrix.error(x_MK, ours(x_MK))
    found: Row = {
        "held_as": matrix.layers[0].kind,
        "error": error if math.isfinite(error) else None,
        "checked_outputs": outputs,
    }
    if not error < TOLERANCE:
        told = f"the product is off by {error:.3g} of the largest value, allowed is {TOLERANCE}"
        return {"failure": told, **found, **provenance(0, 0)}
    ceiling: Gemm | Reader = Gemm() if case.multiplies else Reader(matrix.nbytes, as_weights=True)
    calls = 1 if case.multiplies else max(1, _TOGETHER // matrix.nbytes)
    works = {_OURS: _on(ours, x_MK, calls), "ceiling": Work(ceiling, calls=calls)}
    if 1 < case.rows <= _FEW_ROWS:
        works["one_row"] = _on(ours, x_MK[:1].clone(), calls)
    if (case.rows == 1 or matrix.kind == "dense") and (theirs := matrix.torchs()) is not None:
        works["torch"] = _on(theirs, x_MK, calls)
    times = rounds.run(works, repetitions, _MOST_SECONDS)
    found |= times.spread(_OURS) | _fraction(case, matrix, ceiling, times)
    if "one_row" in works:
        found |= {"one_row_ms": times.ms("one_row"), "over_one_row": times.ratio(_OURS, "one_row")}
    if "torch" in works:
        found |= {"torch_ms": times.ms("torch"), "torch_repetitions": len(times.of("torch"))}
        found["times_torch"] = times.ratio("torch", _OURS)
    return {**found, **provenance(len(times.of(_OURS)), rounds.WARM_UP)}


def _on(call: Callable[[Tensor], Tensor], x_MK: Tensor, calls: int) -> Work:
    return Work(lambda: call(x_MK), calls=calls)


def _fraction(case: Product, matrix: Matrix, ceiling: Gemm | Reader, times: Times) -> Row:
    """The work that must be done, its rate, the ceiling's rate in the same rounds and the fraction reached."""
    amount: Row
    if isinstance(ceiling, Reader):
        count, most, unit = matrix.nbytes, ceiling.nbytes, "gb_per_s"
        amount = {"bytes": count}
    else:
        count, most, unit = 2 * case.rows * case.outputs * case.inputs, ceiling.flops, "gflop_per_s"
        amount = {"flops": count, "ceiling_product": "x".join(map(str, GEMM))}
    return {
        **amount,
        unit: count / times.ms(_OURS) / 1e6,
        f"ceiling_{unit}": most / times.ms("ceiling") / 1e6,
        "fraction": times.ratio("ceiling", _OURS) * count / most,
    }
