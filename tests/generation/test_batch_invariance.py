"""Logits as a function of the tokens before them, to the bit: whatever was computed beside them, in which chunks, from
which cache, guessed or not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import LLM, SamplingParams
from flexdecode.generation.engine import Engine
from flexdecode.generation.request import Request
from flexdecode.generation.scheduler import Work
from tests.checkpoints import quantize_ckpt, tiny
from tests.generation.running import Told, engine, params, run, speculating
from tests.oracles import ids

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
HYBRID = {"layer_types": ["sliding_attention", "full_attention"]}
PROMPT, NEW = ids(150), 20
OWN = params(NEW)

# name: family, dtype, what its weights and its cache are held as, more of its config
KINDS: dict[str, tuple[str, str, str, str, dict[str, Any]]] = {
    "llama": ("llama", "bf16", "dense", "auto", {}),
    "llama-int4": ("llama", "bf16", "int4", "auto", {"hidden_size": 128, "intermediate_size": 160}),
    "llama-int8-kv": ("llama", "bf16", "dense", "int8", {"head_dim": 20}),
    "qwen3-fp16": ("qwen3", "fp16", "dense", "auto", {"num_attention_heads": 6}),
    "gemma2": ("gemma2", "bf16", "dense", "auto", {"head_dim": 32}),
    "gemma3": ("gemma3_text", "bf16", "dense", "auto", HYBRID | {"num_key_value_heads": 1, "num_attention_heads": 8}),
    "gpt-oss": ("gpt_oss", "bf16", "dense", "auto", {}),
    "qwen3-moe": ("qwen3_moe", "bf16", "dense", "int8", {}),
    "llama-fp32": ("llama", "fp32", "dense", "auto", {}),
}


class Known:
    """Rows of logits by the tokens that lead to them; every later row for the same tokens must have the same bits."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, ...], Tensor] = {}
        self.again = 0

    def watch(self, e: Engine) -> Engine:
        compute = e._runner.run

        def checked(works: Sequence[Work]) -> Tensor:
            # Read before the engine counts what is computed.
            wanted = [(w.request.tokens(0, w.request.length), w) for w in works]
            logits = compute(works)
            at = 0
            for tokens, w in wanted:
                for i in range(w.rows):
                    self._check((*tokens, *w.proposed[:i]), logits[at + i])
                at += w.rows
            return logits

        e._runner.run = checked  # type: ignore[method-assign]
        return e

    def _check(self, tokens: tuple[int, ...], row: Tensor) -> None:
        if tokens not in self.rows:
            self.rows[tokens] = row.clone()
            return
        self.again += 1
        assert torch.equal(row, self.rows[tokens])


Case = tuple[Any, Known, list[int]]  # a decoder, its logits, and what it says of the prompt alone
Asked = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module", params=KINDS)
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A decoder, and what it says of the prompt alone."""
    family, dtype, held, kv, config = KINDS[request.param]
    d = tmp_path_factory.mktemp(request.param)
    tiny(d / "a", family, **(SMALL | config))
    path = d / "a"
    if held == "int4":
        quantize_ckpt(path, d / "b", d / "twin", group=32)
        path = d / "b"
    model = LLM(path, dtype=dtype, kv_dtype=kv, batch_invariant=True).engine.model
    known = Known()
    e = known.watch(engine(model, prefix_reuse=False))
    (tokens,) = run(e, e.add(PROMPT, OWN))
    assert len(known.rows) == NEW
    assert known.again == 0
    return model, known, tokens


def again(case: Case, e: Engine, before: Sequence[Asked] = (), after: Sequence[Asked] = ()) -> Request:
    """The prompt once more, among others: the same bits for every token."""
    _, known, wanted = case
    rows, known.again = dict(known.rows), 0
    requests = [e.add(*asked) for asked in (*before, (PROMPT, OWN), *after)]
    run(known.watch(e), *requests)
    own = requests[len(before)]
    assert own.output_ids == wanted
    assert known.again >= NEW
    known.rows = rows
    return own


def ragged(count: int) -> list[Asked]:
    chance = random.Random(count)
    return [(ids(chance.randint(1, 90), seed=n), params(chance.randint(1, 12))) for n in range(count)]


@pytest.mark.parametrize("batch", [2, 7, 64])
def test_in_batches(case: Any, batch: int) -> None:
    again(case, engine(case[0], kv_tokens=8192, max_running=64), ragged(batch // 2), ragged((batch - 1) // 2))


@pytest.mark.parametrize("chunk", [1, 17, 512])
def test_in_chunks(case: Any, chunk: int) -> None:
    again(case, engine(case[0], prefill_chunk=chunk))
    again(case, engine(case[0], prefill_chunk=chunk), ragged(2), ragged(1))


def test_from_a_reused_prefix(case: Any) -> None:
    for page in (4, 64):
        e = engine(case[0], page=page)
        for common in (0, 70, 150):
            other = [*PROMPT[:common], *ids(40, seed=common)]
            run(e, e.add(other, params(3)))
            again(case, e)
            e._runner = type(e._runner)(e.model, e.cache)  # no longer watched


def test_preempted_and_resumed(case: Any) -> None:
    e = engine(case[0], kv_tokens=52 * 4, page=4)
    assert again(case, e, [(ids(20, seed=n), params(60)) for n in range(2)]).preemptions


@pytest.mark.parametrize("page", [4, 64])
def test_guessed(case: Any, page: int) -> None:
    chance = random.Random(page)
    told = lambda: Told(len(PROMPT), case[2], lambda: chance.randrange(6))  # noqa: E731
    e, steps = speculating(case[0], told, page=page)
    again(case, e)
    assert any(work.proposed for works in steps.works for work in works)


def test_what_varies_is_refused(tmp_path: Path) -> None:
    tiny(tmp_path, "llama", **SMALL)
    for options, part in (
        ({"attention": "sdpa"}, "sums change with how many queries come together"),
        ({"attention": "reference"}, "sums change with how many queries come together"),
        ({"score": lambda score, b, h, q, k: score * 1.5}, "computed by torch, whose bits change"),
    ):
        with pytest.raises(ValueError, match=part):
            LLM(tmp_path, batch_invariant=True, **options)
