"""Statistics of the inputs of a layer's matrices, gathered while the layer runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flexdecode.config import LayerConfig
from flexdecode.models.linear import DenseLinear
from flexdecode.quantization.statistics import Inputs
from flexdecode.quantizer.groups import groups
from flexdecode.quantizer.layers import Weights
from flexdecode.quantizer.modules import Module


class Observer:
    """Watches, from its making to `finish`, the first reader of every group that has something to quantize."""

    def __init__(self, config: LayerConfig, weights: Weights, modules: Sequence[Module], at: str) -> None:
        widths = {m.target.removeprefix(at): m.group for m in modules if m.quantized}
        self._inputs: dict[str, Inputs] = {}
        self._hooks: list[Any] = []
        for group in groups(config):
            found = [widths[name] for name in group.readers if name in widths]
            if found:
                self._watch(group.readers[0], weights.linears[group.readers[0]], found[0])

    def _watch(self, name: str, linear: DenseLinear, width: int) -> None:
        columns = linear.shape[1]
        inputs = Inputs(columns, columns if width == -1 else width, linear.weight_NK.device)
        self._inputs[name] = inputs

        def take(module: Any, args: tuple[Tensor, ...]) -> None:
            inputs.add(args[0])

        self._hooks.append(linear.register_forward_pre_hook(take))

    def finish(self) -> dict[str, Inputs]:
        """By the reader that was watched. Raises ValueError where an input was not finite."""
        for hook in self._hooks:
            hook.remove()
        for name, inputs in self._inputs.items():
            try:
                inputs.finish()
            except ValueError as problem:
                raise ValueError(f"{name}: {problem}") from None
        return self._inputs
