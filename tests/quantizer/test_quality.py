"""What searching buys: perplexity on text that calibration has not seen, of a small model trained on the spot and of
the real demo model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from flexdecode import LLM
from flexdecode.quantizer.calibration import Samples, python_topics, sample
from flexdecode.quantizer.job import prepare
from flexdecode.quantizer.options import Options
from flexdecode.quantizer.walk import quantize
from flexdecode.text.tokenizer import Tokenizer
from tests.checkpoints import BOS, EOS, VOCAB, byte_tokenizer

pytestmark = pytest.mark.slow


def text() -> list[int]:
    """Bytes of one text."""
    return list("".join(t for t in python_topics() if isinstance(t, str)).encode())[:16_000]


def halves() -> tuple[list[str], list[str]]:
    texts = [text for text in python_topics() if isinstance(text, str)]
    return texts[::2], texts[1::2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers that have learned one text nearly by heart, in half a minute, so that noise in the weights is noise in
    what they say; some channels of what its norms put out are made large, as they are in large models."""
    d = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, bos_token_id=BOS, eos_token_id=EOS,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    data = torch.tensor(text())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(1000):
        starts = torch.randint(0, len(data) - 65, (8,))
        batch = torch.stack([data[s : s + 65] for s in starts])
        loss = F.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for layer in model.model.layers:
            for norm, readers in (
                (layer.input_layernorm, (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)),
                (layer.post_attention_layernorm, (layer.mlp.gate_proj, layer.mlp.up_proj)),
            ):
                norm.weight[::29] *= 16  # the same function, as hard to round as large models are
                for reader in readers:
                    reader.weight[:, ::29] /= 16
    model.save_pretrained(d)
    byte_tokenizer(d)
    return d


def perplexity(model: str | Path, documents: list[list[int]]) -> float:
    llm = LLM(model, dtype="fp32")
    total, count = 0.0, 0
    for ids in documents:
        logits = llm.logits(ids)
        total += float(F.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="sum"))
        count += len(ids) - 1
    return math.exp(total / count)


def compared(
    model: str, out: Path, samples: Samples, documents: list[list[int]], **options: Any
) -> tuple[float, float, float]:
    """Perplexity of the float model, rounded plainly, and with searched scales."""
    found = [perplexity(model, documents)]
    for method in ("rtn", "awq"):
        job = prepare(model, Options(**({"method": method} | options)))
        quantize(job, out / method, samples if method == "awq" else None)
        found.append(perplexity(out / method, documents))
    return found[0], found[1], found[2]


@pytest.mark.parametrize("group", [32, 128])
def test_a_small_trained_model(group: int, trained: Path, tmp_path: Path) -> None:
    pieces = [text()[at : at + 160] for at in range(0, 16_000, 160)]
    samples = sample(pieces[::2], list, VOCAB, samples=50, length=160, seed=0, origin="every other piece")
    plain, rtn, awq = compared(str(trained), tmp_path, samples, pieces[1::2], group_size=group)
    assert plain < 9
    assert plain < awq < rtn
    assert awq - plain < 0.8 * (rtn - plain)


def test_the_demo_model(tmp_path: Path) -> None:
    """Few samples and little text, for time: the order is clear all the same."""
    seen, unseen = halves()
    encode = Tokenizer.load(prepare("demo", Options(method="int8")).source).encode
    samples = sample(seen, encode, 49152, samples=4, length=256, seed=0, origin="half of the topics")
    documents = [ids[:400] for text in unseen[::8] if len(ids := encode(text)) > 400][:4]
    plain, rtn, awq = compared("demo", tmp_path, samples, documents, group_size=32)
    assert plain < awq < rtn
