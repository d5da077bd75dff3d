"""Layers in one call to the kernels against the same layers module by module, and against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import LLM, masks
from flexdecode.kernels import ops
from tests.checkpoints import FAMILIES, quantize_ckpt, tiny
from tests.oracles import assert_close, expected, ids, oracle


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def both(llm: LLM, prompt: list[int], chunk: int) -> tuple[Tensor, Tensor]:
    """Logits with the stack, which must have run, and without."""
    model = llm.engine.model
    stack = model.stack
    assert stack is not None
    stack.kernel.profile(True)
    fused = llm.logits(prompt, chunk)
    assert sum(stack.kernel.times().values()) > 0
    model.stack = None
    plain = llm.logits(prompt, chunk)
    model.stack = stack
    return fused, plain


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    """Every arrangement of norms, biases, windows, sinks, softcaps and experts, one token at a time and several."""
    model = tiny(tmp_path, family)
    llm, prompt = LLM(tmp_path, dtype="fp32"), ids(40)
    wanted = expected(model, prompt)
    for chunk in (1, 5):
        fused, plain = both(llm, prompt, chunk)
        assert_close(fused, plain, 2e-5)
        assert_close(fused, wanted)


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp16", "int8"])
def test_every_cache(kv_dtype: str, tmp_path: Path) -> None:
    """The same numbers reach the cache: int8's scales and roundings included."""
    tiny(tmp_path)
    fused, plain = both(LLM(tmp_path, dtype="fp32", kv_dtype=kv_dtype), ids(40), 3)
    assert_close(fused, plain, 2e-5 if kv_dtype == "fp32" else 5e-3)  # a rounding may fall to the other side


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rounds_where_modules_round(dtype: str, tmp_path: Path) -> None:
    model = tiny(tmp_path)
    prompt = ids(40)
    wanted = expected(model, prompt)
    fused, plain = both(LLM(tmp_path, dtype=dtype), prompt, 1)
    ours, theirs = ((x - wanted).abs().mean().item() for x in (fused, plain))
    assert ours <= 1.2 * theirs


@pytest.mark.parametrize(("fmt", "group"), [("gemm", 32), ("gemv", 128), ("ct", -1)])
def test_int4(fmt: str, group: int, tmp_path: Path) -> None:
    tiny(tmp_path / "floats")
    quantize_ckpt(tmp_path / "floats", tmp_path / "q", tmp_path / "twin", fmt, group, False)
    prompt = ids(30)
    wanted = expected(oracle(tmp_path / "twin"), prompt)
    for chunk in (1, 2, 9, 16):  # one pass over the weights, and several
        fused, plain = both(LLM(tmp_path / "q", dtype="fp32"), prompt, chunk)
        assert_close(fused, plain, 2e-5)
        assert_close(fused, wanted, 2e-3)


def test_odd_shapes(tmp_path: Path) -> None:
    """Outputs that fill no tile, so that gates and ups share one, a head that turns in part, three kv heads."""
    model = tiny(
        tmp_path,
        "phi3",
        hidden_size=120,
        intermediate_size=200,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=20,
        partial_rotary_factor=0.6,
    )
    prompt = ids(40)
    for chunk in (1, 4):
        fused, plain = both(LLM(tmp_path, dtype="fp32"), prompt, chunk)
        assert_close(fused, plain, 2e-5)
        assert_close(fused, expected(model, prompt))


def test_any_number_of_threads(threads: int, tmp_path: Path) -> None:
    """The same bits from one thread and from more than there are processors."""
    tiny(tmp_path)
    llm, prompt = LLM(tmp_path, dtype="fp32"), ids(200)
    several = [llm.logits(prompt, chunk) for chunk in (1, 4)]
    torch.set_num_threads(2)
    for got, chunk in zip(several, (1, 4), strict=True):
        assert torch.equal(got, llm.logits(prompt, chunk))


def test_every_instruction_set(tmp_path: Path) -> None:
    tiny(tmp_path, "gemma2")
    llm, prompt = LLM(tmp_path, dtype="fp32"), ids(40)
    before = ops.use_isa()
    try:
        for isa in ops.isas():
            ops.use_isa(isa)
            fused, plain = both(llm, prompt, 2)
            assert_close(fused, plain, 2e-5)
    finally:
        ops.use_isa(before)


def test_many_sequences_at_once(tmp_path: Path) -> None:
    """Ragged neighbours, some with several new tokens: each gets what it gets alone."""
    tiny(tmp_path, "gemma3_text")
    llm = LLM(tmp_path, dtype="fp32")
    prompts = [ids(n, seed=n) for n in (3, 40, 17, 64, 1, 30)]
    together = llm.generate_batch(prompts)
    assert [c.token_ids for c in together] == [llm.generate(p).token_ids for p in prompts]


def test_what_the_kernels_cannot_run_runs_between(tmp_path: Path) -> None:
    """A score of the user's makes attention a module; a mixture of experts is one; the other halves stay."""

    def nearer(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - 0.01 * (q_idx - kv_idx)

    for family in ("llama", "mixtral"):
        tiny(tmp_path / family, family)
        llm = LLM(tmp_path / family, dtype="fp32", score=nearer if family == "llama" else None)
        assert_close(*both(llm, ids(40), 2), 2e-5)


def test_masks(tmp_path: Path) -> None:
    tiny(tmp_path)
    mask = masks.window(9) | masks.sinks(2)
    fused, plain = both(LLM(tmp_path, dtype="fp32", mask=mask), ids(150), 1)
    assert_close(fused, plain, 2e-5)


def test_no_stack_where_no_kernel_serves(tmp_path: Path) -> None:
    tiny(tmp_path)
    assert LLM(tmp_path, dtype="fp32", attention="reference").engine.model.stack is not None  # the feed-forwards
    llm = LLM(tmp_path, dtype="fp32", attention="reference")
    assert_close(*both(llm, ids(40), 2), 2e-5)


def test_a_long_step_goes_module_by_module(tmp_path: Path) -> None:
    """A prompt, and more tokens than products of few rows are good for."""
    tiny(tmp_path)
    llm = LLM(tmp_path, dtype="fp32")
    stack = llm.engine.model.stack
    assert stack is not None
    assert stack.most_tokens == ops.DENSE_ROWS
    stack.kernel.profile(True)
    llm.logits(ids(36), 9)
    assert sum(stack.kernel.times().values()) == 0
