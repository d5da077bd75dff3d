"""The cases of `bench kernels`: which shapes are measured, and what stands beside them."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from flexdecode.benchmark.cases import SECTIONS, Case, cases

LENGTHS, DIMS, GROUPS = [4096, 8192, 16384, 32768, 65536, 131072], [64, 80, 96, 128, 256], [1, 3, 4, 7, 8]


def of(section: str) -> list[Case]:
    return cases([section], LENGTHS, DIMS, GROUPS)


def test_decode_has_every_axis_and_each_case_once() -> None:
    found = of("decode")
    assert len(found) == len(set(found)) == 6 + 2 * (4 + 4)
    assert {c.keys for c in found} == set(LENGTHS)
    assert {c.head_dim for c in found if c.keys == 131072} == set(DIMS)
    assert {c.group for c in found if c.keys == 131072} == set(GROUPS)
    assert [c.keys for c in found if "flex" in c.beside] == [32768]
    assert all({"sdpa", "sdpa_folded"} <= set(c.beside) for c in found)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_twin_differs_only_in_what_it_is_there_for(section: str) -> None:
    changes = {"bf16": {"kv_dtype"}, "outright": {"keys", "mask"}, "causal": {"mask"}, "no_score": {"score"}}
    changes |= {"one_query": {"queries"}}
    for case in of(section):
        for name, twin in case.twins:
            differing = {f.name for f in fields(Case) if getattr(case, f.name) != getattr(twin, f.name)}
            assert differing == changes[name] | {"twins"}


def test_int8_stands_beside_bf16_at_both_lengths() -> None:
    assert {c.keys for c in of("int8")} == {32768, 131072}
    assert {c.kv_dtype for c in of("int8")} == {torch.int8}


def test_masks_are_where_the_contract_puts_them() -> None:
    shown = [(str(c.mask), str(c.score), c.keys, c.twins[0][1].keys) for c in of("masks")]
    assert shown[0] == ("causal() & window(1024)", "None", 131072, 1024)
    assert shown[1][0] == "mask(causal_in_python)"
    assert {keys for _, _, keys, _ in shown[1:]} == {32768}
    assert all(c.planned for c in of("masks"))


def test_prefill_ends_at_16k_and_its_window_at_32k() -> None:
    *plain, wide = of("prefill")
    assert {(c.keys, c.head_dim) for c in plain} == {(n, d) for n in (4096, 8192, 16384) for d in (64, 128)}
    assert all(c.queries == c.keys and c.multiplies for c in plain)
    assert (wide.keys, str(wide.mask)) == (32768, "causal() & window(4096)")


def test_a_small_run_has_small_cases_only() -> None:
    for case in cases(SECTIONS, [256], [64], [2]):
        assert (case.keys, case.head_dim, case.group) == (256, 64, 2)


def test_sections_keep_their_order_and_unknown_ones_are_refused() -> None:
    found = [case.section for case in cases(["verify", "plan"], LENGTHS, DIMS, GROUPS)]
    assert found == ["plan"] * 3 + ["verify"] * 2
    with pytest.raises(ValueError, match=r"'plans' is not known \(known: decode"):
        cases(["decode", "plans"], LENGTHS, DIMS, GROUPS)
    assert cases(["int4", "dense"], LENGTHS, DIMS, GROUPS) == [], "products are known, and cases of another file"
