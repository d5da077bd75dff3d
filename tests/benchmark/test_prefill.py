"""The prefill benchmark: its floor is made of products and visible pairs, and a row says all that it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexdecode import LLM
from flexdecode.benchmark import prefill
from flexdecode.benchmark.prefill import Products, bench
from flexdecode.benchmark.work import attention_flops, product_flops
from tests.benchmark.columns import EVERY_ROW, FACTS, spread
from tests.benchmark.conftest import PRODUCT, STEP, Clock
from tests.checkpoints import tiny

OWN = {"context", "tokens_per_second", "product_flops", "attention_flops", "gflop_per_s", "gemm_shapes"}
OWN |= {"gemm_gflop_per_s", "floor_ms", "floor_tokens_per_second", "fraction_of_floor", *spread()}


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    tiny(tmp_path)
    return LLM(tmp_path)


def test_a_row_is_complete_and_the_engine_left_as_it_was(llm: LLM) -> None:
    free = llm.engine.cache.free_tokens()
    (row,) = bench(llm, "m", [50], 2)
    assert set(row) == EVERY_ROW | FACTS | OWN
    assert (row["benchmark"], row["context"], row["repetitions"], row["warm_up"]) == ("prefill", 50, 2, 1)
    assert llm.engine.cache.free_tokens() == free
    assert not llm.engine.busy


def test_the_floor_is_products_at_their_rate_and_attention_at_half_of_it(llm: LLM, clock: Clock) -> None:
    clock.drive(llm)
    (row,) = bench(llm, "m", [100], 3)
    assert row["tokens_per_second"] == 100 / STEP  # one step: the prompt fits a chunk
    assert row["gemm_shapes"] == ["100x128x256", "100x128x128", "100x128x512", "100x256x128"]
    products = 2 * 100 * 128 * (256 + 128 + 512 + 256)
    rate = products / (4 * PRODUCT)
    assert row["gemm_gflop_per_s"] == pytest.approx(rate / 1e9)
    multiplied, attended = product_flops(llm.config, 100), attention_flops(llm.config, llm.engine.cache.layers, 100)
    assert (row["product_flops"], row["attention_flops"]) == (multiplied, attended)
    floor = multiplied / rate + attended / (rate / 2)
    assert row["floor_ms"] == pytest.approx(floor * 1e3)
    assert row["floor_tokens_per_second"] == pytest.approx(100 / floor)
    assert row["fraction_of_floor"] == pytest.approx(floor / STEP)
    assert row["gflop_per_s"] == pytest.approx((multiplied + attended) / STEP / 1e9)


def test_every_chunk_of_a_long_prompt_is_timed(clock: Clock) -> None:
    llm = LLM("random:tiny")
    clock.drive(llm)
    (row,) = bench(llm, "m", [1025], 1)
    assert row["ms"] == 3 * STEP * 1e3
    assert row["gemm_shapes"][0].startswith("512x")


def test_a_mask_spares_attention_its_work(tmp_path: Path) -> None:
    tiny(tmp_path)
    plain, masked = LLM(tmp_path), LLM(tmp_path, mask="window(8)")
    rows = [next(bench(llm, "m", [100], 1)) for llm in (plain, masked)]
    assert rows[1]["attention_flops"] < rows[0]["attention_flops"] / 5
    assert rows[1]["mask"] == "causal() & window(8)"


def test_no_prompt_is_prefilled_twice(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = []
    add = llm.engine.add

    def spy(prompt: list[int], params: object) -> object:
        prompts.append(tuple(prompt))
        return add(prompt, params)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.engine, "add", spy)
    list(bench(llm, "m", [20, 30], 3))
    assert len(set(prompts)) == len(prompts) == 2 * (1 + 3)


def test_a_failure_is_a_row_that_says_so_and_others_are_measured(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_fails(self: Products, llm: LLM, tokens: int) -> None:
        if tokens == 20:
            raise RuntimeError("no room")
        make(self, llm, tokens)

    make = Products.__init__
    monkeypatch.setattr(prefill.Products, "__init__", one_fails)
    bad, good = bench(llm, "m", [20, 30], 1)
    assert bad["failure"] == "RuntimeError: no room"
    assert set(bad) >= EVERY_ROW | FACTS | {"context"}
    assert "ms" not in bad
    assert good["ms"] > 0


def test_a_context_that_ends_too_soon_is_refused_before_any_work(llm: LLM) -> None:
    with pytest.raises(ValueError, match="--lengths 256 needs a context of 257 tokens, and it ends at 256; ask for"):
        next(bench(llm, "m", [10, 256], 1))
