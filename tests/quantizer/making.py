"""What the tests of this folder share: tiny models, calibration ids, and a quantization in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexdecode.quantizer.calibration import Samples, random_ids, sample
from flexdecode.quantizer.job import Job, prepare
from flexdecode.quantizer.layer import Record
from flexdecode.quantizer.options import Options
from flexdecode.quantizer.walk import quantize
from tests.checkpoints import VOCAB


def no_text(text: str) -> list[int]:
    raise AssertionError(f"ids were given, not {text!r}")


def pieces(samples: int = 6, length: int = 40, vocab: int = VOCAB, seed: int = 0) -> Samples:
    ids = random_ids(vocab, samples, length, seed)
    return sample(ids, no_text, vocab, samples=samples, length=length, seed=0, origin="ids")


def job_of(source: Path, **options: Any) -> Job:
    return prepare(str(source), Options(**({"group_size": 32} | options)))


def made(source: Path, out: Path, samples: Samples | None = None, **options: Any) -> list[Record]:
    """Quantize `source` to `out`; awq on `samples`, or on random ids."""
    job = job_of(source, **options)
    if job.options.method == "awq" and samples is None:
        samples = pieces(vocab=job.config.vocab_size)
    return quantize(job, out, samples if job.options.method == "awq" else None)
