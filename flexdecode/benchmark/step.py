"""One decode step: how near it comes to the floor, how near to its products alone, and where its time goes.

The floor is the time in which the same threads read, in the same rounds, what the step must read. Products alone are
the model's own, one after the other with nothing between them: a ceiling without the cache and without an engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexdecode.benchmark import rounds
from flexdecode.benchmark.model import READ, STEP, Floor, check_context, facts
from flexdecode.benchmark.operators import KINDS, Profile, read_bytes
from flexdecode.benchmark.provenance import provenance
from flexdecode.benchmark.rounds import Times, Work
from flexdecode.benchmark.session import Session
from flexdecode.llm import LLM
from flexdecode.models.linear import Linear
from flexdecode.models.mlp import Mlp
from flexdecode.models.moe import Moe

_PRODUCTS = "products"


@torch.inference_mode()
def measure(llm: LLM, model: str, context: int, repetitions: int) -> dict[str, Any]:
    """Decode at `context` tokens. One row of results: medians in ms, rates, fractions; `operators` by operator.

    Raises ValueError where context and repetitions do not fit the model's context.
    """
    steps = 2 * (repetitions + rounds.WARM_UP) + 1
    check_context(llm, context + steps, f"--context {context} and --repetitions {repetitions}")
    products, profile = _products(llm), Profile(llm.engine.model)
    floor = Floor(llm, context + steps // 2)

    def run_products() -> None:
        for module, x in products:
            module(x)

    with Session(llm.engine, context, steps + 1) as session:
        session.until_first_tokens()
        works = {
            STEP: Work(session.step),
            _PRODUCTS: Work(run_products),
            READ: Work(floor.reader),
        }
        times = rounds.run(works, repetitions)
        with profile.watching():  # one after the other, as steps are
            watched = [Work(session.step).seconds() for _ in range(repetitions)]
    rate = floor.reader.nbytes / times.ms(READ)
    each = {name: seconds / len(watched) for name, seconds in profile.seconds.items()}
    return {
        "benchmark": "step",
        **facts(llm, model),
        "context": context,
        **times.spread(STEP),
        "tokens_per_second": 1e3 / times.ms(STEP),
        **floor.columns(times),
        **_alone(times, sum(m.nbytes for m, _ in products)),
        **_outside(sum(watched) / len(watched), sum(each.values())),
        "operators": _operators(each, read_bytes(llm.engine.model, floor.kv_bytes), rate),
        **provenance(repetitions, rounds.WARM_UP),
    }


def _alone(times: Times, nbytes: int) -> dict[str, Any]:
    return {
        "products_ms": times.ms(_PRODUCTS),
        "product_bytes": nbytes,
        "products_gb_per_s": nbytes / times.ms(_PRODUCTS) / 1e6,
        "fraction_of_products_alone": times.ratio(_PRODUCTS, STEP),
    }


def _outside(step: float, inside: float) -> dict[str, Any]:
    """What of a watched step is spent outside kernels, in seconds both; watching is counted to it."""
    return {"outside_kernels_ms": (step - inside) * 1e3, "outside_kernels_fraction": 1 - inside / step}


def _operators(each: dict[str, float], read: dict[str, int], bytes_per_ms: float) -> list[dict[str, Any]]:
    rows = []
    for name in KINDS:
        seconds, nbytes = each.get(name, 0.0), read.get(name, 0)
        if seconds:
            rows.append({"operator": name, "ms": seconds * 1e3, "bytes": nbytes})
            rows[-1]["fraction_of_floor"] = nbytes / bytes_per_ms / seconds / 1e3
    return rows


def _products(llm: LLM) -> list[tuple[Linear, Tensor]]:
    """Every product of a step of one token, with an input for it. Of experts, as many as a token uses."""
    model, found = llm.engine.model, list[Linear]()
    for layer in model.layers:
        found += [layer.attention.qkv, layer.attention.out]
        ff = layer.feed_forward
        if isinstance(ff, Moe):
            used = range(ff.config.experts_per_token)
            found += [ff.router, *(m[e] for e in used for m in (ff.gate_up, ff.down))]  # type: ignore[list-item]
        else:
            assert isinstance(ff, Mlp)
            found += [ff.gate_up, ff.down]
    found.append(model.head)
    return [(m, torch.randn(1, m.shape[1], dtype=model.dtype, device=model.device)) for m in found]
