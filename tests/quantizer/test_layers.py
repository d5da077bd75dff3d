"""Layers one at a time against the whole model, and documents that do not see each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from flexdecode.models.load import WeightLoader
from flexdecode.quantizer import layers
from flexdecode.quantizer.job import Job
from flexdecode.quantizer.layers import Runner, read_layer
from tests.checkpoints import FAMILIES, tiny
from tests.oracles import assert_close, expected, ids, oracle
from tests.quantizer.making import job_of

CPU = torch.device("cpu")


@torch.inference_mode()
def through(job: Job, documents: list[list[int]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """fp32 logits of each document, layer by layer."""
    runner = Runner(job.config, CPU, [len(d) for d in documents], dtype)
    loader = WeightLoader(job.source, job.config, job.names, torch.float32, CPU)
    (embed,) = job.table["embed"].parts
    hidden = job.source.rows(embed.name, torch.tensor([i for d in documents for i in d]))
    hidden *= job.config.embedding_multiplier
    for index in range(job.layers):
        layer = runner.build(index, read_layer(loader, job.config, index, job.targets(index)))
        for rows, y_TD in runner.run(index, layer, hidden):
            hidden[rows] = y_TD
    norm = loader.norm("norm", job.config.norm_eps)
    assert norm is not None
    head = loader.matrix("head" if "head" in job.table else "embed")
    assert isinstance(head, Tensor)
    logits = norm(hidden) @ head.T / job.config.logit_divisor
    cap = job.config.logit_softcap
    return list((logits if cap is None else cap * torch.tanh(logits / cap)).split([len(d) for d in documents]))


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_one_by_one_are_the_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each document as transformers reads it alone, whatever is beside it in a chunk."""
    monkeypatch.setattr(layers, "CHUNK", 50)
    tiny(tmp_path, family, num_hidden_layers=2)
    model, documents = oracle(tmp_path), [ids(30, 1), ids(15, 2), ids(60, 3), ids(1, 4)]
    for document, logits in zip(documents, through(job_of(tmp_path), documents), strict=True):
        assert_close(logits, expected(model, document))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_layers_in_bf16(family: str, tmp_path: Path) -> None:
    """Products, attention and the cache in bf16: near fp32, and the fp32 weights untouched."""
    tiny(tmp_path, family, gain=1.0, num_hidden_layers=2)
    job, document = job_of(tmp_path), ids(60)
    (wanted,), (logits,) = through(job, [document]), through(job, [document], torch.bfloat16)
    assert 0 < float((logits - wanted).norm() / wanted.norm()) < 0.03
