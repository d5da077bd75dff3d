"""A quantization, prepared: the checkpoint opened, every matrix's fate decided, and the saved file's names and config.

Reads headers only. A GGUF file is saved as the Hugging Face model that it was made from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from flexdecode.checkpoints.open import open_source
from flexdecode.config import ModelConfig
from flexdecode.families import FAMILIES, gguf, resolve
from flexdecode.families.names import Names
from flexdecode.families.rules import Rules, check, file_names, rules
from flexdecode.quantizer.dense import DenseSource
from flexdecode.quantizer.modules import Module, choose
from flexdecode.quantizer.options import Options

_DTYPES = {"float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Job:
    """`names` and `table` are the source's, `saved_names` and `saved_table` the result's. Both tables have the same
    targets, whose parts correspond."""

    source: DenseSource
    config: ModelConfig
    options: Options
    names: Names
    table: Rules
    saved_names: Names
    saved_table: Rules
    modules: tuple[Module, ...]
    ignore_config: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        return len(self.config.layers)

    def targets(self, layer: int) -> list[str]:
        """Those of a layer, in order."""
        return [target for target in self.table if target.startswith(f"layers.{layer}.")]

    def of_layer(self, layer: int) -> list[Module]:
        return [m for m in self.modules if m.target.startswith(f"layers.{layer}.")]

    def kept_names(self, layer: int) -> list[str]:
        """Tensors of a layer that are copied as the source has them."""
        present = frozenset(self.source.names())
        kept = {m.target for m in self.of_layer(layer) if m.kind == "kept"}
        parts = [part for target in self.targets(layer) if target in kept for part in self.table[target].all()]
        return sorted({name for part in parts for name in file_names(part, present)})

    def other_names(self) -> list[str]:
        """Tensors that are no part of the decoder (another modality's, constants), copied as the source has them."""
        if self.source.format == "gguf":
            return []  # what they say is in the config
        present = frozenset(self.source.names())
        used = {name for rule in self.table.values() for part in rule.all() for name in file_names(part, present)}
        return sorted(present - used)


def prepare(
    model: str,
    options: Options,
    *,
    revision: str | None = None,
    offline: bool = False,
    ignore_config: Collection[str] = (),
) -> Job:
    """Raises ValueError for a checkpoint or an option that cannot be served, before a weight is read."""
    inner = open_source(model, revision=revision, offline=offline, dense_dtype=torch.bfloat16)
    config, names = resolve(inner, ignore_config)
    source = DenseSource(inner, _DTYPES.get(config.dtype, torch.bfloat16))
    present = frozenset(source.names())
    table = rules(config, names, present)
    check(table, names, source)
    saved_names = FAMILIES[config.family].names if source.format == "gguf" else names
    if source.format == "gguf" and saved_names.packed_experts:
        raise ValueError(f"{source.path}: a GGUF file of this family cannot be saved again; quantize the HF checkpoint")
    if any(name.endswith("_blocks") for name in present):
        raise ValueError(
            f"{source.path}: its experts are MXFP4 already, and no format holds those beside int4; use it as it is"
        )
    saved_present = {f"{saved_names.head}.weight"} if "head" in table else set[str]()
    saved_table = rules(config, saved_names, saved_present)
    assert saved_table.keys() == table.keys()
    modules = tuple(choose(saved_table, options, str(source.path)))
    return Job(source, config, options, names, table, saved_names, saved_table, modules, tuple(ignore_config))


def saved_config(job: Job) -> dict[str, Any]:
    """config.json of the result."""
    if job.source.format == "gguf":
        config, _ = gguf.translate(job.source)
        model_type = config["model_type"]
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        config = {"architectures": [architecture], **config, "dtype": "bfloat16"}
    else:
        config = dict(job.source.config)
    for key in ("quantization_config", "compression_config"):
        config.pop(key, None)
    return config | {"quantization_config": quantization_config(job)}


def quantization_config(job: Job) -> dict[str, Any]:
    """In the keys of the format, with the options under `flexdecode`."""
    options, told = job.options, {"flexdecode": dict(job.options.as_dict())}
    left = list(dict.fromkeys(m.name for m in job.modules if not m.quantized))
    other = [prefix.strip(".") for prefix in job.saved_names.drop]
    if options.layout == "gemm":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": options.group_size,
            "zero_point": True,  # the file has them; under --symmetric all are 8
            "version": "gemm",
            "modules_to_not_convert": [*left, *other] or None,
        } | told
    head = [job.saved_names.head]
    return {
        "quant_method": "compressed-tensors",
        "format": options.layout,
        "quantization_status": "compressed",
        "ignore": [*head, *left, *(f"re:.*{prefix}\\..*" for prefix in other)],
        "config_groups": _config_groups(job),
        "kv_cache_scheme": None,
    } | told


def _config_groups(job: Job) -> dict[str, Mapping[str, Any]]:
    """A group for each width. Where there are several each names its matrices: readers differ in which of two groups
    counts for a matrix that one names and the other includes."""
    by_width: dict[int, list[str]] = {}
    for module in job.modules:
        if module.quantized:
            by_width.setdefault(module.group, []).append(module.name)
    widths = sorted(by_width, key=lambda width: (-len(by_width[width]), -width))
    found: dict[str, Mapping[str, Any]] = {}
    for number, width in enumerate(widths):
        weights = {
            "num_bits": job.options.bits,
            "type": "int",
            "symmetric": job.options.symmetric or job.options.bits == 8,
            "strategy": "channel" if width == -1 else "group",
            "group_size": None if width == -1 else width,
            "dynamic": False,
        }
        targets = by_width[width] if len(widths) > 1 else ["Linear"]
        found[f"group_{number}"] = {
            "targets": targets,
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
            "format": job.options.layout,
        }
    return found
