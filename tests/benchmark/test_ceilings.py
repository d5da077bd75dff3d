"""The ceilings count what they do."""

from __future__ import annotations

import pytest

from flexdecode.benchmark.ceilings import Gemm, Reader, copies


def test_a_reader_reads_whole_words_of_another_copy_each_time() -> None:
    reader = Reader(1 << 20)
    assert reader.nbytes == 1 << 20
    places = {slab.data_ptr() for slab in (next(reader._next) for _ in range(3))}
    assert len(places) == 3
    reader()


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(1, 64), (16 << 20, 16), (200 << 20, 2), (256 << 20, 1), (1 << 40, 1)]
)
def test_copies_outgrow_a_cache(nbytes: int, expected: int) -> None:
    assert copies(nbytes) == expected


def test_a_product_counts_a_multiplication_and_an_addition() -> None:
    product = Gemm((2, 8, 4))
    assert product.flops == 2 * 2 * 8 * 4
    product()
