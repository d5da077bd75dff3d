"""How near a prefill comes to its products alone.

The floor of a prefill is the time in which the same threads could multiply what it must: its products at the rate of
torch's bf16 products of the model's own shapes, measured in the same rounds, and its attention, visible pairs only, at
half of that rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from flexdecode.benchmark import rounds
from flexdecode.benchmark.ceilings import Gemm
from flexdecode.benchmark.model import check_context, facts
from flexdecode.benchmark.provenance import provenance
from flexdecode.benchmark.rounds import Work
from flexdecode.benchmark.rows import FAILURES, Row, failure
from flexdecode.benchmark.session import Session
from flexdecode.benchmark.work import attention_flops, layer_products, product_flops
from flexdecode.llm import LLM

_ATTENTION_SHARE = 0.5  # of the rate of products: what attention multiplies is small, and softmax lies in between


class Products:
    """One bf16 product by torch of each shape that the model's layers have, of as many rows as a step of a prefill."""

    def __init__(self, llm: LLM, tokens: int) -> None:
        rows = min(tokens, llm.engine.config.prefill_chunk)
        self.shapes = [(rows, k, n) for n, k in layer_products(llm.config)]
        self._products = [Gemm(shape, llm.engine.model.device) for shape in self.shapes]
        self.flops = sum(product.flops for product in self._products)

    def __call__(self) -> None:
        for product in self._products:
            product()


def bench(llm: LLM, model: str, lengths: Sequence[int], repetitions: int) -> Iterator[Row]:
    """A row for each length, as it is measured. One that failed has `failure` and no times.

    Raises ValueError where the model's context ends before the longest.
    """
    check_context(llm, max(lengths) + 1, f"--lengths {max(lengths)}")
    for length in lengths:
        row = {"benchmark": "prefill", **facts(llm, model), "context": length}
        try:
            yield {**row, **_measured(llm, length, repetitions)}
        except FAILURES as problem:
            yield {**row, **failure(problem)}


@torch.inference_mode()
def _measured(llm: LLM, length: int, repetitions: int) -> Row:
    sessions: list[Session] = []

    def renew() -> None:
        while sessions:
            sessions.pop().close()
        sessions.append(Session(llm.engine, length, 1))

    products = Products(llm, length)
    works = {
        "prefill": Work(lambda: sessions[0].until_first_tokens(), before=renew),
        "products": Work(products),
    }
    try:
        times = rounds.run(works, repetitions)
    finally:
        while sessions:
            sessions.pop().close()
    multiplied = product_flops(llm.config, length)
    attended = attention_flops(llm.config, llm.engine.cache.layers, length)
    share = (multiplied + attended / _ATTENTION_SHARE) / products.flops
    return {
        **times.spread("prefill"),
        "tokens_per_second": length / times.ms("prefill") * 1e3,
        "product_flops": multiplied,
        "attention_flops": attended,
        "gflop_per_s": (multiplied + attended) / times.ms("prefill") / 1e6,
        "gemm_shapes": ["x".join(map(str, shape)) for shape in products.shapes],
        "gemm_gflop_per_s": products.flops / times.ms("products") / 1e6,
        "floor_ms": times.ms("products") * share,
        "floor_tokens_per_second": length / (times.ms("products") * share) * 1e3,
        "fraction_of_floor": times.ratio("products", "prefill") * share,
        **provenance(repetitions, rounds.WARM_UP),
    }
