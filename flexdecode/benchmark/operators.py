"""Where the time of a decode step goes: by operator, with what each must read, and what is left between them.

Layers that run as one call to the kernels tell their phases themselves; modules are timed as they are called. What is
neither is time outside kernels: the engine, the plan, the sampler and Python.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from flexdecode.models.decoder import Decoder
from flexdecode.models.linear import Linear
from flexdecode.models.mlp import Mlp
from flexdecode.models.moe import Moe
from flexdecode.models.norm import RMSNorm

# Products by the phase of the kernels that they are.
_PHASES = {"qkv": "qkv", "out": "out", "gate_up": "gate and up", "down": "down"}
KINDS = ("embedding", "norms", "qkv", "rope and cache", "attention", "out", "gate and up", "down", "experts", "head")


class Profile:
    """Seconds by operator of the steps run inside `watching`."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self.seconds: dict[str, float] = defaultdict(float)
        self._since: list[float] = []
        self._inside: list[float] = []  # of each open module, seconds of the modules within it

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the model's modules, and the phases of its kernels."""
        handles = []
        for name, module in self._watched():
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(partial(self._leave, name)))
        stack = self._model.stack
        if stack is not None:
            stack.kernel.profile(True)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            if stack is not None:
                for phase, seconds in stack.kernel.times().items():
                    self.seconds["attention" if phase == "merging" else phase] += seconds
                stack.kernel.profile(False)

    def _watched(self) -> Iterator[tuple[str, nn.Module]]:
        model = self._model
        yield "head", model.head
        if model.stack is not None and model.stack.whole:
            return  # nothing else is called, and what is watched takes longer
        yield "embedding", model.embed
        yield "norms", model.norm
        for layer in model.layers:
            yield "qkv", layer.attention.qkv
            yield "out", layer.attention.out
            yield "attention", layer.attention  # less its products: rope and cache are a part of it here
            ff = layer.feed_forward
            if isinstance(ff, Mlp):
                yield "gate and up", ff.gate_up
                yield "down", ff.down
            else:
                yield "experts", ff
            norms = (layer.attention_pre, layer.attention_post, layer.ff_pre, layer.ff_post)
            yield from (("norms", norm) for norm in norms if norm is not None)

    def _enter(self, *_: Any) -> None:
        self._since.append(time.perf_counter())
        self._inside.append(0.0)

    def _leave(self, name: str, *_: Any) -> None:
        spent = time.perf_counter() - self._since.pop()
        self.seconds[name] += spent - self._inside.pop()
        if self._inside:
            self._inside[-1] += spent


def read_bytes(model: Decoder, kv_bytes: int) -> dict[str, int]:
    """Bytes that one step of one token must read, by operator. `kv_bytes` are those of the cache."""
    found: dict[str, int] = defaultdict(int)
    found["embedding"], found["head"], found["attention"] = model.embed.row_bytes, model.head.nbytes, kv_bytes
    found["norms"] = sum(m.weight.nbytes for m in model.modules() if isinstance(m, RMSNorm))
    for layer in model.layers:
        parts: dict[str, nn.Module] = {"qkv": layer.attention.qkv, "out": layer.attention.out}
        ff = layer.feed_forward
        if isinstance(ff, Mlp):
            parts |= {"gate_up": ff.gate_up, "down": ff.down}
        else:
            assert isinstance(ff, Moe)
            found["experts"] += ff.read_bytes
        for name, module in parts.items():
            assert isinstance(module, Linear)
            found[_PHASES[name]] += module.nbytes
    return dict(found)
