"""What a quantization will take, told before it begins: memory at its peak, disk, arithmetic. From shapes alone.

Memory is what is added to a process that has already imported torch. The figures follow `walk` step by step and are
upper ones; a test holds them against a real run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flexdecode.config import AttentionConfig, LayerConfig, MlpConfig
from flexdecode.quantization.search import COARSE, MOST_ROWS
from flexdecode.quantization.statistics import band_width
from flexdecode.quantizer.groups import groups
from flexdecode.quantizer.job import Job
from flexdecode.quantizer.layers import CHUNK
from flexdecode.quantizer.modules import Module

_FP32 = 4
_SLAB_COPIES = 8 << 24  # of search: eight fp32 copies of a slab
_SLACK = 1.1  # blocks too small to be given back, and what libraries keep for themselves
_CANDIDATES = 2 * (len(COARSE) + 2) + 1  # of the scale search, at most


@dataclass(frozen=True)
class Estimate:
    """Bytes and floating-point operations. `hidden_bytes` are the calibration text's hidden states."""

    saved_bytes: int
    source_bytes: int
    hidden_bytes: int
    block_bytes: int
    peak_bytes: int
    operations: float
    quantized: int
    left: int

    def as_dict(self) -> dict[str, Any]:
        return {
            "matrices_quantized": self.quantized,
            "matrices_left": self.left,
            "source_bytes": self.source_bytes,
            "saved_bytes": self.saved_bytes,
            "largest_layer_in_fp32_bytes": self.block_bytes,
            "hidden_states_bytes": self.hidden_bytes,
            "peak_memory_added_bytes": self.peak_bytes,
        }


def estimate(job: Job, tokens: int, longest: int) -> Estimate:
    """For `tokens` calibration tokens (0 without calibration) in pieces of at most `longest`."""
    hidden = _FP32 * tokens * job.config.hidden_size
    chunk = min(max(CHUNK, longest), tokens)
    layers = [_layer_peak(job, i, chunk, bool(tokens)) for i in range(job.layers)]
    outside = [_stored(job, target) for target in ("embed", "head") if target in job.table]
    others = sum(job.source.nbytes(name) for name in job.other_names())
    # Rows of the embedding are read in its own dtype first. Shards are written from where their tensors lie.
    peak = hidden + max(hidden // 2 + outside[0] + others, *outside, *layers)
    return Estimate(
        saved_bytes=_saved(job),
        source_bytes=sum(job.source.nbytes(name) for name in job.source.names()),
        hidden_bytes=hidden,
        block_bytes=max(_FP32 * _elements(job, i) for i in range(job.layers)),
        peak_bytes=int(_SLACK * peak),
        operations=sum(_operations(job, i, tokens) for i in range(job.layers)),
        quantized=sum(m.quantized for m in job.modules),
        left=sum(not m.quantized for m in job.modules),
    )


def saved_size(module: Module, job: Job) -> int:
    """Bytes that a quantized matrix takes in the file."""
    rows, columns = module.shape
    if module.kind == "int8":
        return rows * columns + 2 * rows
    groups_ = rows * (1 if module.group == -1 else columns // module.group)
    zeros = 0.0 if job.options.layout != "gemm" and job.options.symmetric else 0.5
    return int(rows * columns / 2 + groups_ * (2 + zeros))


def _saved(job: Job) -> int:
    total = sum(saved_size(m, job) for m in job.modules if m.quantized)
    replaced = {m.target: sum(math.prod(x.shape) for x in job.modules if x.target == m.target and x.quantized)
                for m in job.modules if m.quantized}  # fmt: skip
    for target, rule in job.table.items():
        elements = sum(math.prod(part.shape) for part in rule.all())
        total += 2 * (elements - replaced.get(target, 0))
    return total + sum(job.source.nbytes(name) for name in job.other_names())


def _elements(job: Job, layer: int) -> int:
    return sum(math.prod(part.shape) for target in job.targets(layer) for part in job.table[target].all())


def _stored(job: Job, target: str) -> int:
    """Bytes of a target as it is read, dequantized matrices in fp32."""
    return sum(max(job.source.nbytes(part.name), 2 * math.prod(part.shape)) for part in job.table[target].parts)


def _layer_peak(job: Job, layer: int, chunk: int, calibrated: bool) -> int:
    config = job.config.layers[layer]
    modules = job.of_layer(layer)
    weights = _FP32 * _elements(job, layer)
    reading = max(2 * 2 * math.prod(part.shape) for t in job.targets(layer) for part in job.table[t].parts)
    largest = max((m.shape[0] * m.shape[1] for m in modules if m.quantized), default=0)
    rounding = 14 * largest + _SLAB_COPIES
    written = sum(saved_size(m, job) for m in modules if m.quantized)
    written += 2 * sum(m.shape[0] * m.shape[1] for m in modules if not m.quantized)
    if not calibrated:
        return weights + max(reading, rounding) + written
    return weights + _statistics(job, layer) + max(reading, _forward(config, job, chunk), rounding) + written


def _statistics(job: Job, layer: int) -> int:
    widths = {m.target.split(".", 2)[2]: m for m in job.of_layer(layer) if m.quantized}
    total = 0
    for group in groups(job.config.layers[layer]):
        module = next((widths[name] for name in group.readers if name in widths), None)
        if module is not None:
            columns = module.columns
            total += _FP32 * columns * band_width(columns, columns if module.group == -1 else module.group)
    return total


def _forward(config: LayerConfig, job: Job, chunk: int) -> int:
    """Activations of a chunk: four of the hidden size, three of the widest product of each half; and the largest matrix
    in the compute type, where that is not fp32."""
    inner = config.feed_forward.intermediate_size
    again = 0 if job.options.dtype == "float32" else 2 * job.config.hidden_size * max(2 * inner, _qkv(config.attention))
    return again + _FP32 * chunk * (4 * job.config.hidden_size + 3 * _qkv(config.attention) + 6 * inner)


def _qkv(a: AttentionConfig) -> int:
    return (a.heads + 2 * a.kv_heads) * a.head_dim


def _operations(job: Job, layer: int, tokens: int) -> float:
    """Multiplications and additions: two passes, statistics, search; without calibration about ten a weight."""
    if not tokens:
        return 10.0 * _elements(job, layer)
    config, modules = job.config.layers[layer], job.of_layer(layer)
    ff = config.feed_forward
    share = 1.0 if isinstance(ff, MlpConfig) else ff.experts_per_token / ff.experts
    active = sum(m.shape[0] * m.columns * (share if ".experts." in m.target else 1.0) for m in modules)
    passes = 2 if job.options.next_inputs == "quantized" else 1
    total = 2.0 * passes * tokens * active
    for group in groups(config):
        readers = [m for m in modules if m.target.split(".", 2)[2] in group.readers and m.quantized]
        if readers:
            columns = readers[0].columns
            band = band_width(columns, columns if readers[0].group == -1 else readers[0].group)
            total += 2.0 * columns * band * (tokens * share + _CANDIDATES * MOST_ROWS)
            total += 6.0 * columns * band * sum(m.shape[0] for m in readers)
    return total
