"""Matrices of weights: apart in memory, counted as they are read, and checked so that a fault anywhere is seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexdecode.benchmark import matrices
from flexdecode.benchmark.ceilings import copies
from flexdecode.benchmark.matrices import TOLERANCE, Matrix, build, exact
from flexdecode.quantization.weights import Weight

KINDS = [("int4", 32), ("int4", 64), ("int8", None), ("dense", None)]


@pytest.fixture
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "copies", lambda nbytes: 2)


def a_matrix(kind: str, group_size: int | None) -> Matrix:
    return build(kind, 96, 128, group_size)


def values(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize()


@pytest.mark.parametrize(("kind", "group_size"), KINDS)
def test_the_exact_rows_are_the_weights_own(kind: str, group_size: int | None) -> None:
    weight = matrices._weight(kind, 96, 128, group_size, torch.Generator().manual_seed(0))
    index = torch.tensor([0, 5, 95])
    torch.testing.assert_close(exact(weight, index).float(), values(weight)[index].float())
    deviation = float(values(weight).float().std()) * 128**0.5
    assert 0.7 < deviation < 1.4, "of a trained model's size, so that results are of the size of activations"


@pytest.mark.parametrize(("kind", "group_size"), KINDS)
@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.usefixtures("few_copies")
def test_ours_and_torchs_are_the_same_product(kind: str, group_size: int | None, rows: int) -> None:
    matrix, x = a_matrix(kind, group_size), torch.randn(rows, 128).bfloat16()
    theirs = matrix.torchs()
    assert theirs is not None
    for call in (matrix.ours(), theirs):
        for _ in range(3):  # every copy, and the first again
            error, outputs = matrix.error(x, call(x))
            assert error < TOLERANCE
            assert outputs == 96


@pytest.mark.parametrize(("kind", "group_size"), KINDS)
@pytest.mark.parametrize("fault", ["one output", "nan", "zeros"])
@pytest.mark.usefixtures("few_copies")
def test_faults_are_seen(kind: str, group_size: int | None, fault: str) -> None:
    matrix, x = a_matrix(kind, group_size), torch.randn(2, 128).bfloat16()
    y = matrix.ours()(x)
    if fault == "one output":
        y[-1, -1] += 0.1 * y.abs().max()
    else:
        y.fill_(float("nan") if fault == "nan" else 0.0)
    assert not matrix.error(x, y)[0] < TOLERANCE


@pytest.mark.usefixtures("few_copies")
def test_of_many_outputs_some_at_random_are_checked_and_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "_MOST_CHECKED", 10)
    matrix, x = a_matrix("int8", None), torch.randn(1, 128).bfloat16()
    y = matrix.ours()(x)
    assert matrix.error(x, y)[1] == 10
    for at in (0, -1):
        wrong = y.clone()
        wrong[0, at] += 1
        assert matrix.error(x, wrong)[0] > TOLERANCE


def test_copies_are_more_than_a_cache_holds_and_each_has_memory_of_its_own() -> None:
    matrix = a_matrix("dense", None)
    assert matrix.nbytes == 96 * 128 * 2
    assert len(matrix.layers) == copies(matrix.nbytes) == 64
    places = {layer.weight_NK.data_ptr() for layer in matrix.layers}
    assert len(places) == 64


@pytest.mark.usefixtures("few_copies")
def test_int4_is_read_as_int4() -> None:
    assert a_matrix("int4", 32).nbytes < 96 * 128 * 0.65


def test_the_need_of_memory_grows_with_the_matrix_and_not_with_copies_of_small_ones() -> None:
    small, large = (matrices.needed_bytes("dense", n, 4096, None) for n in (4096, 65536))
    assert 2 * 256 << 20 < small < 2 << 30
    assert large > 3 * 65536 * 4096 * 2
    assert matrices.needed_bytes("int4", 65536, 4096, 128) < large / 2
