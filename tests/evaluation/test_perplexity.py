"""Perplexity against transformers, window by window, and against distributions that are known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from flexdecode import LLM
from flexdecode.checkpoints.demo import demo_path
from flexdecode.evaluation import reading
from flexdecode.evaluation.perplexity import perplexity
from flexdecode.evaluation.spread import mean_and_error
from flexdecode.evaluation.texts import built_in_text
from tests.checkpoints import BOS, VOCAB, dist, tiny
from tests.evaluation.models import TEXT, add_bos, in_steps_of
from tests.oracles import expected


def oracle(model: Any, texts: list[str], context: int, stride: int, bos: bool) -> list[float]:
    """Negative log-likelihoods as the usual loop over overlapping windows has them, each token of a text once."""
    found: list[float] = []
    for text in texts:
        ids = list(text.encode())
        width = context + (0 if bos else 1)  # with what is to be predicted; a BOS is read and never predicted
        begin, known = 0, 0 if bos else 1
        while known < len(ids):
            end = min(begin + width, len(ids))
            piece = [BOS, *ids[begin:end]] if bos else ids[begin:end]
            losses = F.cross_entropy(expected(model, piece)[:-1], torch.tensor(piece[1:]), reduction="none")
            found += losses[-(end - known) :].tolist()
            begin, known = begin + stride, end
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    folders = {}
    for family in ("llama", "gemma3_text"):
        d = tmp_path_factory.mktemp(family)
        folders[family] = (d, tiny(d, family, gain=2.0))
    add_bos(folders["gemma3_text"][0])
    return folders


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize(("context", "stride"), [(64, 16), (64, 64), (50, 49), (33, 1), (256, 128)])
def test_transformers_has_the_same(
    family: str, context: int, stride: int, made: dict[str, tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_PIECE_BYTES", 11 * 4 * VOCAB)
    d, model = made[family]
    texts = [TEXT[:90], "", "x", TEXT[:150]] if stride == 1 else [TEXT, "", "x", TEXT[:130]]
    llm = in_steps_of(LLM(d, dtype="fp32"), 24)
    found = perplexity(llm, texts, context=context, stride=stride)
    bos = family == "gemma3_text"
    wanted = torch.tensor(oracle(model, texts, context, stride, bos), dtype=torch.float64)
    mean, error = mean_and_error(wanted)
    assert (found.tokens, found.bos) == (len(wanted), bos)
    assert found.nll == pytest.approx(mean, abs=1e-4)
    assert found.nll_error == pytest.approx(error, rel=1e-3)
    assert found.perplexity == pytest.approx(math.exp(mean), rel=1e-4)
    assert found.perplexity_error == pytest.approx(math.exp(mean) * (error or 0.0), rel=1e-3)
    size = sum(len(text.encode()) - (0 if bos or not text else 1) for text in texts)
    assert found.bytes == size
    assert found.bits_per_byte == pytest.approx(float(wanted.sum()) / math.log(2) / size, abs=1e-4)
    assert llm.engine.cache.lengths == {}


def test_a_known_distribution(tmp_path: Path) -> None:
    """Half a, a quarter b, a quarter c after anything: `aabc` without its first token has 1 + 2 + 2 bits."""
    dist(tmp_path, {ord("a"): 0.5, ord("b"): 0.25, ord("c"): 0.25})
    found = perplexity(LLM(tmp_path, dtype="fp32"), ["aabc"])
    assert found.bits_per_byte == pytest.approx(5 / 3, abs=1e-4)
    assert found.nll == pytest.approx(5 / 3 * math.log(2), abs=1e-4)
    assert (found.tokens, found.bytes, found.documents) == (3, 3, 1)


def test_defaults_and_limit(made: dict[str, tuple[Path, Any]]) -> None:
    llm = LLM(made["llama"][0], dtype="fp32")
    seen = []
    found = perplexity(llm, [TEXT, TEXT], limit=300, progress=lambda *told: seen.append(told))
    assert (found.context, found.stride) == (256, 128)
    assert (found.tokens, found.documents) == (299, 1)
    assert seen == [("scoring", 256, 299), ("scoring", 299, 299)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": 257}, "context=257 is more than the model's 256"),
        ({"context": 16, "stride": 17}, "stride is 17: it must be between 1 and the context of 16"),
        ({"limit": 1}, "1 tokens in 1 documents"),
    ],
)
def test_wrong_numbers(options: dict[str, int], words: str, made: dict[str, tuple[Path, Any]]) -> None:
    with pytest.raises(ValueError, match=words):
        perplexity(LLM(made["llama"][0]), [TEXT], **options)  # type: ignore[arg-type]


def test_no_figure_where_logits_are_not_finite(
    made: dict[str, tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(made["llama"][0], dtype="fp32")
    logits = llm.engine.model.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        out = logits(hidden)
        out[3] = math.nan
        return out

    monkeypatch.setattr(llm.engine.model, "logits", broken)
    with pytest.raises(ValueError, match="token 4 of document 0 has a log-likelihood that is not finite"):
        perplexity(llm, [TEXT])


@pytest.mark.slow
def test_the_demo_model_as_transformers_reads_it() -> None:
    path = demo_path()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    llm = LLM("demo", dtype="fp32")
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(built_in_text())[:600]
    losses = []
    for begin in range(0, 600 - 129, 128):
        piece = ids[begin : begin + 257]
        own = F.cross_entropy(expected(model, piece)[:-1], torch.tensor(piece[1:]), reduction="none")
        losses.append(own if begin == 0 else own[128:])
    wanted = torch.cat(losses)
    found = perplexity(llm, [built_in_text()], context=256, stride=128, limit=600)
    assert found.tokens == len(wanted) == 599
    assert found.nll == pytest.approx(float(wanted.mean()), abs=1e-4)
    rounded = perplexity(LLM("demo"), [built_in_text()], context=256, stride=128, limit=600)
    assert abs(rounded.nll - found.nll) < 0.02
