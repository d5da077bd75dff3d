"""What a run is said to take, against what it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flexdecode.checkpoints.index import read_header
from flexdecode.quantizer.estimate import estimate
from flexdecode.quantizer.job import prepare
from flexdecode.quantizer.options import Options
from tests.checkpoints import tiny
from tests.quantizer.making import job_of, made

GIB = 1 << 30
# A run in a process of its own, with few candidates so that it is short: memory does not depend on how many.
PROGRAM = """
import json, sys
from pathlib import Path
import torch
from flexdecode.memory import peak_resident_bytes, resident_bytes
from flexdecode.quantization import search
from flexdecode.quantizer.calibration import random_ids, sample
from flexdecode.quantizer.estimate import estimate
from flexdecode.quantizer.job import prepare
from flexdecode.quantizer.options import Options
from flexdecode.quantizer.walk import quantize
model, out, tokens, layers, options = *sys.argv[1:3], *map(int, sys.argv[3:5]), json.loads(sys.argv[5])
out = Path(out)
search.COARSE, search.MOST_ROWS = (0.5,), 64
torch.ones(512, 512) @ torch.ones(512, 512)
job = prepare(model, Options(**options))
samples = None
if job.options.method == "awq":
    ids = random_ids(job.config.vocab_size, tokens // 256, 256, 0)
    samples = sample(ids, list, job.config.vocab_size, samples=999, length=256, seed=0, origin="ids")
before = resident_bytes()
said = estimate(job, samples.tokens if samples else 0, 256)
peaks = []

def watch(done, total):
    peaks.append(peak_resident_bytes() - before)
    if done == layers:
        raise KeyboardInterrupt

try:
    quantize(job, out, samples, progress=watch)
except KeyboardInterrupt:
    pass
print(json.dumps({"said": said.peak_bytes, "took": peaks}))
"""


def measured(model: str, out: Path, tokens: int, layers: int, **options: Any) -> tuple[int, list[int]]:
    """(bytes that were said, the peak so far before each layer and after the last)."""
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, model, str(out), str(tokens), str(layers), json.dumps(options)],
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    return int(found["said"]), list(found["took"])


@pytest.mark.parametrize(
    "options",
    [
        {"method": "rtn"},
        {"method": "rtn", "format": "compressed-tensors", "symmetric": True, "group_size": -1},
        {"method": "int8"},
        {"method": "awq", "skip": ("k_proj",)},
    ],
)
def test_the_size_of_the_file(options: dict[str, Any], tmp_path: Path) -> None:
    tiny(tmp_path / "float", dtype=torch.bfloat16, num_hidden_layers=2)
    said = estimate(job_of(tmp_path / "float", **options), 240, 40).saved_bytes
    made(tmp_path / "float", tmp_path / "out", **options)
    tensors = sum(entry.nbytes for entry in read_header(tmp_path / "out" / "model.safetensors").values())
    assert abs(said - tensors) <= 0.01 * tensors


def test_a_large_model_fits_a_small_machine() -> None:
    """Llama-3.1-8B within 24 GiB, by a wide margin, with 64 k tokens of calibration."""
    for options, tokens in ((Options(method="rtn"), 0), (Options(), 128 * 512)):
        job = prepare("random:llama-3.1-8b", options)
        found = estimate(job, tokens, 512)
        assert found.peak_bytes < 12 * GIB
        assert found.saved_bytes < 6 * GIB
        assert found.block_bytes < GIB


def test_memory_does_not_grow_with_layers() -> None:
    """36 layers of one model and 32 of another of the same size."""
    jobs = [prepare(f"random:{name}", Options()) for name in ("qwen3-8b", "llama-3.1-8b")]
    peaks = [estimate(job, 4096, 512).peak_bytes for job in jobs]
    assert max(peaks) < 1.4 * min(peaks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options", "tokens"),
    [("llama-3.2-1b", {"method": "rtn"}, 0), ("qwen3-0.6b", {"method": "awq"}, 1024)],
)
def test_memory_is_what_was_said(model: str, options: dict[str, Any], tokens: int, tmp_path: Path) -> None:
    """And a later layer takes no more than an earlier one."""
    said, took = measured(f"random:{model}", tmp_path / "out", tokens, 8, **options)
    assert took[-1] <= said < 1.5 * took[-1]
    assert took[-1] <= 1.1 * took[2]
