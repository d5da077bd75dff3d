"""The benchmark of products checks before it measures, and gets its fractions and ratios right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode.benchmark import matrices, products, rows
from flexdecode.benchmark.ceilings import Gemm
from flexdecode.benchmark.products import Product, bench, cases

ONE = Product("int4", 96, 128, 1, 32)
EACH = [ONE, Product("int8-weights", 96, 128, 1), Product("dense", 96, 128, 1)]
EVERY_ROW = {"benchmark", "section", "kernel", "outputs", "inputs", "rows", "group_size", "dtype", "isa", "threads"}
EVERY_ROW |= {"cpu", "flexdecode", "torch", "python", "commit", "dirty", "date", "warm_up", "repetitions"}
MEASURED = {"held_as", "error", "checked_outputs", "ms", "ms_q1", "ms_q3", "ms_min", "ms_max", "fraction"}


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "Gemm", lambda: Gemm((8, 16, 8)))
    monkeypatch.setattr(matrices, "copies", lambda nbytes: 2)


def row_of(case: Product) -> dict[str, Any]:
    (row,) = bench([case], 2, [1])
    return row


@pytest.mark.parametrize("case", EACH, ids=lambda case: case.section)
@pytest.mark.parametrize("count", [1, 4, 16, 64])
def test_a_row_is_complete(case: Product, count: int) -> None:
    row = row_of(replace(case, rows=count))
    assert set(row) >= EVERY_ROW | MEASURED
    assert (row["warm_up"], row["repetitions"], row["threads"]) == (1, 2, 1)
    assert (row["section"], row["rows"], row["group_size"]) == (case.section, count, case.group_size)
    assert 0 <= row["error"] < 1e-2
    assert 0 < row["ms_min"] <= row["ms_q1"] <= row["ms"] <= row["ms_q3"] <= row["ms_max"]
    reads = {"bytes", "gb_per_s", "ceiling_gb_per_s"}
    multiplies = {"flops", "gflop_per_s", "ceiling_gflop_per_s", "ceiling_product"}
    assert set(row) & (reads | multiplies) == (reads if count <= 16 else multiplies)
    assert ("over_one_row" in row) == (1 < count <= 16)
    assert ("times_torch" in row) == (count == 1 or case.section == "dense")


def test_few_rows_are_a_fraction_of_reading(one_second_each: dict[str, float]) -> None:
    one_second_each |= {"product": 4.0, "ceiling": 3.0, "one_row": 2.0}
    row = row_of(Product("dense", 96, 128, 4))
    count = 96 * 128 * 2
    assert row["bytes"] == count
    assert row["gb_per_s"] == pytest.approx(count / 4e9)
    assert row["ceiling_gb_per_s"] == pytest.approx(count / 3e9)
    assert row["fraction"] == pytest.approx(0.75)
    assert (row["over_one_row"], row["one_row_ms"]) == (2.0, 2e3)
    assert row["times_torch"] == 0.25


def test_many_rows_are_a_fraction_of_a_product_of_another_size(one_second_each: dict[str, float]) -> None:
    one_second_each |= {"product": 4.0, "ceiling": 2.0}
    row = row_of(replace(ONE, rows=64))
    count, product = 2 * 64 * 96 * 128, 2 * 8 * 16 * 8
    assert row["flops"] == count
    assert row["gflop_per_s"] == pytest.approx(count / 4e9)
    assert row["ceiling_gflop_per_s"] == pytest.approx(product / 2e9)
    assert row["fraction"] == pytest.approx((count / 4) / (product / 2))


@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_a_wrong_product_is_not_measured_and_others_are(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def product(x: Tensor, *_: object) -> Tensor:
        return torch.full((len(x), 96), wrong, dtype=x.dtype)

    monkeypatch.setattr("flexdecode.kernels.ops.linear_int4", product)
    bad, good = bench([ONE, EACH[1]], 1, [1])
    assert "off by" in bad["failure"]
    assert "ms" not in bad
    assert set(bad) >= EVERY_ROW
    assert good["ms"] > 0


def test_what_does_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "available_bytes", lambda device: 1 << 29)
    row = row_of(ONE)
    assert "0.5 GiB are available" in row["skipped"]
    assert set(row) >= EVERY_ROW


def test_a_matrix_is_built_once_for_all_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    make = products.build

    def build(*matrix: Any) -> Any:
        built.append(matrix)
        return make(*matrix)

    monkeypatch.setattr(products, "build", build)
    found = list(bench(cases(["int4", "dense"], [(64, 64)], [32, 64], [1, 2]), 1, [1]))
    assert [row["rows"] for row in found] == [1, 2] * 3
    assert built == [("int4", 64, 64, 32), ("int4", 64, 64, 64), ("dense", 64, 64, None)]


def test_every_axis_is_there_and_groups_are_int4s_alone() -> None:
    shapes, sizes, counts = [(64, 128), (128, 64)], [32, 64], [1, 512]
    found = cases(["dense", "decode", "int4", "int8-weights"], shapes, sizes, counts)
    assert len(found) == len(set(found)) == 2 * 2 * (2 + 1 + 1)
    assert list(dict.fromkeys(case.section for case in found)) == ["int4", "int8-weights", "dense"]
    assert {case.group_size for case in found if case.section != "int4"} == {None}
    assert cases(["decode"], shapes, sizes, counts) == []
    with pytest.raises(ValueError, match="--group-sizes 48 does not divide the 64 inputs of 128x64"):
        cases(["int4"], [(128, 64)], [48], [1])
