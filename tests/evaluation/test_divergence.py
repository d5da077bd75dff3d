"""Divergence: nothing from oneself, what transformers' logits give from another, and what is kept meanwhile."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from flexdecode import LLM
from flexdecode.evaluation import reading
from flexdecode.evaluation.divergence import divergence, read_reference
from flexdecode.evaluation.perplexity import perplexity
from flexdecode.evaluation.spread import mean_and_error
from flexdecode.evaluation.windows import windows
from tests.checkpoints import VOCAB, tiny
from tests.evaluation.models import TEXT, add_bos
from tests.oracles import expected

MODELS = {"one": {"seed": 0}, "two": {"seed": 1}, "wide": {"vocab_size": VOCAB + 8}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    return {name: (d, tiny(d, gain=2.0, **MODELS[name])) for name, d in folders.items()}


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "fp32"},
        {"dtype": "bf16"},
        {"dtype": "bf16", "kv_dtype": "int8"},
        {"dtype": "fp32", "mask": "window(8) | sinks(2)"},
    ],
    ids=str,
)
def test_nothing_from_oneself(options: dict[str, str], made: dict[str, tuple[Path, Any]]) -> None:
    d = made["one"][0]
    found = divergence(read_reference(LLM(d, **options), [TEXT, "x"], context=64), LLM(d, **options))  # type: ignore[arg-type]
    assert (found.kl, found.kl_error, found.kl_median, found.largest.kl) == (0.0, 0.0, 0.0, 0.0)
    assert (found.agreement, found.agreement_error) == (1.0, 0.0)
    assert found.reference_perplexity == found.model_perplexity
    assert all((bucket.kl, bucket.agreement) == (0.0, 1.0) for bucket in found.by_position)


@pytest.mark.parametrize("context", [50, 64, 256])
def test_transformers_logits_give_the_same(
    context: int, made: dict[str, tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_PIECE_BYTES", 13 * 4 * VOCAB)
    (first, its), (second, own) = made["one"], made["two"]
    texts = [TEXT[:301], "", TEXT[:40]]
    found = divergence(read_reference(LLM(first, dtype="fp32"), texts, context=context), LLM(second, dtype="fp32"))
    kl, same, position, target = [], [], [], []
    for number, text in enumerate(texts):
        ids = list(text.encode())
        for window in windows(len(ids), context, context):
            p, q = (expected(m, window.inputs(ids)).double().log_softmax(-1) for m in (its, own))
            kl.append((p.exp() * (p - q)).sum(-1))
            same.append((p.argmax(-1) == q.argmax(-1)).double())
            position += range(len(p))
            target += [(number, window.first + i + 1) for i in range(len(p))]
    kl_T, same_T, position_T = torch.cat(kl), torch.cat(same), torch.tensor(position)
    mean, error = mean_and_error(kl_T)
    assert found.tokens == len(kl_T) == sum(len(text.encode()) - 1 for text in texts if text)
    assert found.kl == pytest.approx(mean, rel=1e-4)
    assert found.kl_error == pytest.approx(error, rel=1e-3)
    assert found.kl_median == pytest.approx(float(kl_T.median()), rel=1e-3)
    assert found.agreement == pytest.approx(float(same_T.mean()), abs=1e-9)
    worst = int(kl_T.argmax())
    assert found.largest.kl == pytest.approx(float(kl_T[worst]), rel=1e-4)
    assert (found.largest.document, found.largest.token) == target[worst]
    assert sum(bucket.tokens for bucket in found.by_position) == found.tokens
    for bucket in found.by_position:
        inside = (position_T >= bucket.first) & (position_T <= bucket.last)
        assert bucket.tokens == int(inside.sum())
        assert bucket.kl == pytest.approx(float(kl_T[inside].mean()), rel=1e-3)
        assert bucket.agreement == pytest.approx(float(same_T[inside].mean()), abs=1e-9)
    assert [bucket.first for bucket in found.by_position] == [f for f in (0, 16, 64) if f < context]
    assert found.by_position[-1].last == context - 1


def test_perplexities_are_those_of_the_same_windows(made: dict[str, tuple[Path, Any]]) -> None:
    llms = [LLM(made[name][0], dtype="fp32") for name in ("one", "two")]
    alone = [perplexity(llm, [TEXT], context=64, stride=64).perplexity for llm in llms]
    found = divergence(read_reference(llms[0], [TEXT], context=64), llms[1])
    assert [found.reference_perplexity, found.model_perplexity] == pytest.approx(alone, rel=1e-5)


def test_a_window_leaves_the_positions_that_it_covers_alone(made: dict[str, tuple[Path, Any]]) -> None:
    d = made["one"][0]
    kept = read_reference(LLM(d, dtype="fp32"), [TEXT], context=128)
    found = divergence(kept, LLM(d, dtype="fp32", mask="window(16)"))
    assert [bucket.kl < 1e-9 for bucket in found.by_position] == [True, False, False]


def test_a_bos_is_read_by_both(made: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    tiny(tmp_path)
    add_bos(tmp_path)
    found = divergence(read_reference(LLM(tmp_path), ["abc"], context=2), LLM(tmp_path))
    assert found.bos
    assert (found.tokens, found.kl) == (3, 0.0)


def test_the_reference_is_let_go_but_for_its_head(made: dict[str, tuple[Path, Any]]) -> None:
    llm = LLM(made["one"][0], dtype="fp32")
    gone = [weakref.ref(x) for x in (llm, llm.engine.cache, llm.engine.model.layers[0])]
    kept = read_reference(llm, [TEXT], context=64)
    del llm
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]
    assert [tuple(hidden.shape) for hidden in kept.hidden[:2]] == [(64, 128), (64, 128)]


def test_models_that_cannot_be_compared(made: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    kept = read_reference(LLM(made["one"][0]), [TEXT], context=64)
    with pytest.raises(ValueError, match=f"a vocabulary of {VOCAB} and the model one of {VOCAB + 8}"):
        divergence(kept, LLM(made["wide"][0]))
    tiny(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(
        path.read_text()
        .replace('"a":97', '"a":98')
        .replace('"b":98', '"b":97')
        .replace('"a": 97', '"a": 98')
        .replace('"b": 98', '"b": 97')
    )
    with pytest.raises(ValueError, match="cut the text into different tokens"):
        divergence(kept, LLM(tmp_path))


def test_a_text_too_short(made: dict[str, tuple[Path, Any]]) -> None:
    with pytest.raises(ValueError, match="1 tokens in 1 documents"):
        read_reference(LLM(made["one"][0]), ["x"])
