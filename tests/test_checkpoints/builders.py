"""Small checkpoints and integer matrices for the tests of this folder, written from the layouts' descriptions and
independent of the decoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"


def write_model(directory: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    save_file(
        {k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors", metadata={"format": "pt"}
    )
    return directory


def write_shards(directory: Path, *shards: dict[str, Tensor]) -> Path:
    """config.json, model-0000i-of-0000n.safetensors and an index that lists every tensor."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def integers(n: int, k: int, group: int, *, seed: int = 0, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [N, K], fp32 scales that fp16 holds [N, G], zeros [N, G]); zeros 0 and 15 are among them."""
    generator = torch.Generator().manual_seed(seed)
    groups = 1 if group == -1 else k // group
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.int32)
    scales = (torch.rand(n, groups, generator=generator) * 0.02 + 0.001).half().float()
    zeros = torch.randint(0, 16, (n, groups), generator=generator, dtype=torch.int32)
    zeros.flatten()[:2] = torch.tensor([0, 15])[: zeros.numel()]
    return codes, scales, torch.full_like(zeros, 8) if symmetric else zeros


def plain(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The matrix in fp32, element by element."""
    group = codes.shape[1] // scales.shape[1]
    return (codes - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)


def pack_gemv_fast(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    """AutoAWQ gemv_fast, one nibble at a time: of word (n, 64t + m), with r = m // 16, h = m % 16 // 8 and j = m % 8,
    nibble v is row 4n + r, column 64t + 32h + j + 8v."""
    n, k = codes.shape
    group = k // scales.shape[1]
    words = torch.zeros(n // 4, k, dtype=torch.int32)
    for column in range(k):
        t, m = divmod(column, 64)
        r, h, j = m // 16, m % 16 // 8, m % 8
        for v in range(4):
            words[:, column] |= codes[r::4, 64 * t + 32 * h + j + 8 * v].int() << (4 * v)
    words = torch.where(words >= 1 << 15, words - (1 << 16), words).to(torch.int16)
    multiple = 1 if group >= 128 else 2 if group >= 64 else 4
    padded = -(-scales.shape[1] // (8 * multiple)) * multiple * 8
    scales_SN, zeros_SN = torch.zeros(padded, n).half(), torch.zeros(padded, n).half()
    scales_SN[: scales.shape[1]] = scales.t().half()
    zeros_SN[: scales.shape[1]] = (-(scales * zeros)).t().half()
    return {"qweight": words, "qzeros": zeros_SN, "scales": scales_SN}
