"""A transformers model, with transformers' own attention and with ours: one decode step over a static cache, in turn.

The model has random weights in a known shape, and the cache random keys and values: what a step does does not depend on
them. All that differs between the two is `attn_implementation`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from flexdecode import transformers as ours
from flexdecode.benchmark import rounds
from flexdecode.benchmark.provenance import provenance
from flexdecode.benchmark.rounds import Work
from flexdecode.checkpoints.shapes import SHAPES

BESIDE = "sdpa"


class Hosted:
    """A transformers model in bf16 with a static cache that ends at `context` tokens."""

    def __init__(self, shape: str, context: int) -> None:
        if shape not in SHAPES:
            raise ValueError(f"the shape {shape!r} is not known (known: {', '.join(SHAPES)})")
        config = AutoConfig.for_model(**SHAPES[shape])
        if context >= config.max_position_embeddings:
            raise ValueError(f"{context} tokens do not fit {shape}, which ends at {config.max_position_embeddings}")
        self.context = context
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.cache = StaticCache(config=config, max_cache_len=context + 1)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache.early_initialization(1, config.num_key_value_heads, head_dim, torch.bfloat16, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        for layer in self.cache.layers:
            layer.keys.normal_(generator=generator)
            layer.values.normal_(generator=generator)

    def use(self, implementation: str) -> None:
        """Make ready for one step."""
        self.model.set_attn_implementation(implementation)
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)

    @torch.inference_mode()
    def step(self) -> Tensor:
        """Logits of one token at position `context`."""
        position = torch.tensor([[self.context]])
        out = self.model(torch.tensor([[1]]), past_key_values=self.cache, position_ids=position, use_cache=True)
        logits: Tensor = out.logits[0, -1].float()
        return logits


def measure(shape: str, context: int, repetitions: int) -> dict[str, Any]:
    """One row: medians in ms, the ratio, and how far the two agree (largest difference over the largest logit)."""
    hosted = Hosted(shape, context)
    logits = {}
    for name in (ours.NAME, BESIDE):
        hosted.use(name)
        logits[name] = hosted.step()
    difference = (logits[ours.NAME] - logits[BESIDE]).abs().max() / logits[BESIDE].abs().max()
    works = {name: Work(hosted.step, before=lambda name=name: hosted.use(name)) for name in logits}  # type: ignore[misc]
    times = rounds.run(works, repetitions)
    return {
        "benchmark": "transformers",
        "model": f"random:{shape}",
        "dtype": "bfloat16",
        "cache": "static",
        "context": context,
        "step_ms": times.ms(ours.NAME),
        f"{BESIDE}_step_ms": times.ms(BESIDE),
        f"times_{BESIDE}": times.ratio(BESIDE, ours.NAME),
        "difference": float(difference),
        **provenance(repetitions, rounds.WARM_UP),
    }
