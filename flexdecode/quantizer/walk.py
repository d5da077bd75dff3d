"""The walk through a model: embed, then layer by layer read, calibrate, quantize, write, let go.

One layer is in memory at a time, and the hidden states of the calibration text, which are also what an interrupted run
goes on from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexdecode import __version__
from flexdecode.checkpoints.open import open_source
from flexdecode.checkpoints.save import copy_beside, write_json
from flexdecode.families import resolve
from flexdecode.families.rules import check, rules
from flexdecode.memory import map_large_blocks
from flexdecode.models.layer import Layer
from flexdecode.models.load import WeightLoader
from flexdecode.quantization.statistics import Inputs
from flexdecode.quantizer.calibration import Samples
from flexdecode.quantizer.folder import Folder
from flexdecode.quantizer.job import Job, saved_config
from flexdecode.quantizer.layer import LayerQuantizer, Record
from flexdecode.quantizer.layers import Runner, Weights, read_layer
from flexdecode.quantizer.observe import Observer

Progress = Callable[[int, int], None]  # layers done, layers in all
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def quantize(
    job: Job,
    out: Path,
    samples: Samples | None,
    *,
    device: torch.device | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    beside: Callable[[Path], None] | None = None,
) -> list[Record]:
    """Write the quantized checkpoint to `out` and return a record a matrix.

    `samples` calibrate awq, which needs them; the other methods take none. `beside` is called with the folder before it
    gets its name, to add what is not copied from a directory. Raises ValueError for whatever the folder or the weights
    do not allow; what was finished before an error or an interruption can be resumed.
    """
    assert (job.options.method == "awq") == (samples is not None)
    device = device or torch.device("cpu")
    map_large_blocks()  # else each layer leaves holes behind, and memory grows
    folder = Folder(out, plan(job, samples), job.layers + 2, resume=resume)
    with torch.inference_mode():
        _Walk(job, folder, samples, device, progress).run()
    write_json(folder.path / "config.json", saved_config(job))
    if job.source.path.is_dir():
        copy_beside(job.source.path, folder.path)
    if beside is not None:
        beside(folder.path)
    records = [Record(**record) for record in folder.records]
    write_json(folder.path / "quantize_report.json", report(job, samples, records))
    folder.close()
    prepared_again(folder.path, job)
    folder.finish()
    return records


def prepared_again(path: Path, job: Job) -> None:
    """Raises ValueError where the saved headers and config do not make the model that was read: a fault of ours, found
    before the result has its name."""
    source = open_source(path)
    config, names = resolve(source, job.ignore_config)
    check(rules(config, names, frozenset(source.names())), names, source)


def plan(job: Job, samples: Samples | None) -> Mapping[str, Any]:
    """What decides every byte of the result."""
    return {
        "version": __version__,
        "source": str(job.source.path),
        "tensors": {name: list(job.source.shape(name)) for name in sorted(job.source.names())},
        "options": dict(job.options.as_dict()),
        "calibration": samples.fingerprint() if samples is not None else None,
    }


def report(job: Job, samples: Samples | None, records: list[Record]) -> dict[str, Any]:
    """What was done, in plain values."""
    return {
        "flexdecode": __version__,
        "source": job.source.path.name,
        "options": dict(job.options.as_dict()),
        "calibration": str(samples) if samples is not None else None,
        "matrices": [record.as_dict() for record in records],
    }


class _Walk:
    def __init__(
        self, job: Job, folder: Folder, samples: Samples | None, device: torch.device, progress: Progress | None
    ) -> None:
        self._job, self._folder, self._samples, self._device = job, folder, samples, device
        self._progress = progress or (lambda done, total: None)
        self._loader = WeightLoader(job.source, job.config, job.names, torch.float32, device)
        self._runner = Runner(job.config, device, samples.lengths if samples else (), DTYPES[job.options.dtype])

    def run(self) -> None:
        layers, folder = self._job.layers, self._folder
        if folder.done == 0:
            hidden = self._embed()
            folder.add(self._outside("embed") | self._copied(self._job.other_names()), hidden=hidden)
        else:
            hidden = folder.hidden()
        self._progress(folder.done - 1, layers)
        for index in range(folder.done - 1, layers):
            tensors, records = self._layer(index, hidden)
            folder.add(tensors, [record.as_dict() for record in records], hidden if index + 1 < layers else None)
            self._progress(index + 1, layers)
        if folder.done == layers + 1:
            last = self._outside("norm")
            if "head" in self._job.table:
                last |= self._outside("head")
            folder.add(last)

    def _embed(self) -> Tensor | None:
        """fp32 [T, D] of the calibration text."""
        if self._samples is None:
            return None
        (part,) = self._job.table["embed"].parts
        ids = torch.tensor([i for piece in self._samples.pieces for i in piece])
        hidden = self._job.source.rows(part.name, ids)
        return hidden.mul_(self._job.config.embedding_multiplier)

    def _layer(self, index: int, hidden: Tensor | None) -> tuple[dict[str, Tensor], list[Record]]:
        """Quantize one layer and move `hidden` past it."""
        job, at = self._job, f"layers.{index}."
        modules, targets = job.of_layer(index), job.targets(index)
        if hidden is None:  # kept matrices are read only to be run
            kept = {m.target for m in modules if m.kind == "kept"}
            targets = [target for target in targets if target not in kept]
        weights = read_layer(self._loader, job.config, index, targets)
        inputs: Mapping[str, Inputs] = {}
        layer: Layer | None = None
        follow = job.options.next_inputs
        if hidden is not None:
            layer = self._runner.build(index, weights)
            inputs = self._observed(index, layer, weights, hidden, move=follow == "float")
        quantizer = LayerQuantizer(
            job.config.layers[index],
            weights,
            modules,
            at,
            job.options,
            job.saved_names.norm_offset,
            self._dtype_of(index),
            inputs,
        )
        try:
            quantizer.smooth()
            tensors, records = quantizer.round()
        except ValueError as problem:
            raise ValueError(f"{job.source.path}: {problem}") from None
        tensors |= self._vectors(index, weights) | self._copied(job.kept_names(index))
        if layer is not None and hidden is not None and follow == "quantized":
            for rows, y_TD in self._runner.run(index, layer, hidden):
                hidden[rows] = y_TD.to(hidden)
        return tensors, records

    def _observed(self, index: int, layer: Layer, weights: Weights, hidden: Tensor, move: bool) -> Mapping[str, Inputs]:
        """Statistics of the layer's inputs, by a group's first reader; with `move` hidden states go past the layer."""
        observer = Observer(self._job.config.layers[index], weights, self._job.of_layer(index), f"layers.{index}.")
        for rows, y_TD in self._runner.run(index, layer, hidden):
            if move:
                hidden[rows] = y_TD.to(hidden)
        try:
            return observer.finish()
        except ValueError as problem:
            raise ValueError(f"{self._job.source.path}: layer {index}: {problem}") from None

    def _dtype_of(self, index: int) -> Callable[[str], torch.dtype]:
        """The dtype in which a module's weight, or a norm given by its target inside the layer, is saved."""
        job, found = self._job, dict[str, torch.dtype]()
        for target in job.targets(index):
            pairs = zip(job.table[target].parts, job.saved_table[target].parts, strict=True)
            for part, saved in pairs:
                if part.name in job.source.dtypes:
                    found[saved.name.removesuffix(".weight")] = job.source.dtypes[part.name]
                    found[target.removeprefix(f"layers.{index}.")] = job.source.dtypes[part.name]
        return lambda name: found[name]

    def _vectors(self, index: int, weights: Weights) -> dict[str, Tensor]:
        """Norms without the family's offset, and vectors, by their names in the file."""
        at, offset, dtype_of = f"layers.{index}.", self._job.saved_names.norm_offset, self._dtype_of(index)
        values = {name: norm.weight - offset for name, norm in weights.norms.items()} | weights.vectors
        saved = {name: self._job.saved_table[at + name].parts[0].name for name in values}
        return {saved[name]: value.to(dtype_of(name)).cpu() for name, value in values.items()}

    def _outside(self, target: str) -> dict[str, Tensor]:
        """A tensor outside the layers, under its name in the file."""
        source = self._job.source
        (part,), (saved,) = self._job.table[target].parts, self._job.saved_table[target].parts
        tensor = source.read(part.name)
        if target == "norm":
            tensor = tensor.float() + self._job.names.norm_offset - self._job.saved_names.norm_offset
        return {saved.name: tensor.to(source.dtypes[part.name])}

    def _copied(self, names: list[str]) -> dict[str, Tensor]:
        return {name: self._job.source.read(name) for name in names}
