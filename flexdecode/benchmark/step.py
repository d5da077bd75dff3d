"""How near a decode step comes to its products alone.

The ceiling of this benchmark is the time in which the model's own weight products (torch's int4 op, say) run one
after the other on one row, with nothing between them. Steps and products are timed in turn, so that both see the same
machine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexdecode.benchmark import rounds
from flexdecode.benchmark.ceilings import Reader
from flexdecode.benchmark.provenance import provenance
from flexdecode.benchmark.rounds import Times, Work
from flexdecode.generation.params import SamplingParams
from flexdecode.llm import LLM
from flexdecode.models.linear import Linear
from flexdecode.models.moe import Moe


def measure(llm: LLM, context: int, repetitions: int) -> dict[str, Any]:
    """Decode at `context` tokens. One row of results: medians in ms, rates, and the fraction of the ceiling.

    Raises ValueError where context and repetitions do not fit the model's context.
    """
    needed = context + repetitions + 3
    if needed > llm.max_context:
        raise ValueError(
            f"{context} tokens of context and {repetitions} repetitions need {needed}, the context ends at "
            f"{llm.max_context}"
        )
    products = _products(llm)
    times = _times(llm, context, repetitions, products)
    step, alone, read = (times.ms(name) for name in ("step", "products", "reads"))
    weights = sum(m.nbytes for m, _ in products)
    return {
        "benchmark": "step",
        "context": context,
        "dtype": str(llm.engine.model.dtype).removeprefix("torch."),
        "step_ms": step,
        "step_ms_min": min(times.of("step")) * 1e3,
        "step_ms_max": max(times.of("step")) * 1e3,
        "products_ms": alone,
        "tokens_per_second": 1e3 / step,
        "fraction_of_products_alone": times.ratio("products", "step"),
        "product_bytes": weights,
        "products_gb_per_s": weights / alone / 1e6,
        "read_gb_per_s": weights / read / 1e6,
        **provenance(repetitions, rounds.WARM_UP),
    }


def _products(llm: LLM) -> list[tuple[Linear, Tensor]]:
    """Every product of a step of one token, with an input for it. Of experts, as many as a token uses."""
    model, found = llm.engine.model, []
    for layer in model.layers:
        modules: list[Linear] = [layer.attention.qkv, layer.attention.out]
        ff = layer.feed_forward
        if isinstance(ff, Moe):
            used = range(ff.config.experts_per_token)
            modules += [ff.router, *(m[e] for e in used for m in (ff.gate_up, ff.down))]  # type: ignore[list-item]
        else:
            modules += [ff.gate_up, ff.down]  # type: ignore[list-item]
        found += modules
    found.append(model.head)
    return [(m, torch.randn(1, m.shape[1], dtype=model.dtype, device=model.device)) for m in found]


@torch.inference_mode()
def _times(llm: LLM, context: int, repetitions: int, products: list[tuple[Linear, Tensor]]) -> Times:
    """Whole steps of the engine, the products alone, and reads of as many bytes."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, llm.config.vocab_size, (context,), generator=generator).tolist()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=repetitions + 3).resolve({})
    request = llm.engine.add(prompt, params)
    reader = Reader(sum(module.nbytes for module, _ in products))

    def run_products() -> None:
        for module, x in products:
            module(x)

    while not request.output_ids:  # the prefill
        llm.engine.step()
    works = {"step": Work(llm.engine.step), "products": Work(run_products), "reads": Work(reader)}
    times = rounds.run(works, repetitions)
    llm.engine.abort(request)
    return times
