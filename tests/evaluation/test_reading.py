"""Reading through a model: the same predictions as LLM.logits, in any steps and from any branch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flexdecode import LLM
from flexdecode.evaluation import reading as module
from flexdecode.evaluation.reading import Reading, log_likelihoods, logits_in_pieces, needed_tokenizer, piece_rows
from tests.checkpoints import VOCAB, tiny
from tests.evaluation.models import in_steps_of
from tests.oracles import assert_close, ids

FAMILIES = ["llama", "gemma3_text", "gpt_oss"]  # the last two have windows, of 16 tokens, and pages given back


@pytest.fixture(scope="module", params=FAMILIES)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    d = tmp_path_factory.mktemp(request.param)
    tiny(d, request.param)
    return LLM(d, dtype="fp32")


def test_logits_are_llms_bit_for_bit(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, wanted = ids(200), llm.logits(ids(200))
    sizes = []
    logits = llm.engine.model.logits
    monkeypatch.setattr(llm.engine.model, "logits", lambda h: sizes.append(len(h)) or logits(h))
    with Reading(llm, len(tokens)) as reading:
        hidden = reading.read(tokens)
        assert torch.equal(torch.cat(list(logits_in_pieces(llm.engine.model, hidden))), wanted)
        assert sizes == [200]
        monkeypatch.setattr(module, "_PIECE_BYTES", 7 * 4 * VOCAB + 5)
        sizes.clear()
        assert_close(torch.cat(list(logits_in_pieces(llm.engine.model, hidden))), wanted)
        assert max(sizes) == piece_rows(VOCAB) == 7


def test_a_piece_has_a_row_at_least() -> None:
    assert piece_rows(49152) * 49152 * 4 <= 16 << 20
    assert piece_rows(10**9) == 1


def test_branches_go_on_by_themselves(llm: LLM) -> None:
    start, ends = ids(130), [ids(40, seed=2), ids(7, seed=3), ids(70, seed=4)]
    model = in_steps_of(llm, 32).engine.model
    with Reading(llm, 200) as reading:
        reading.read(start)
        for end in ends:
            with reading.fork() as branch:
                first = branch.read(end[:3])
                got = torch.cat([first, branch.read(end[3:])])
            wanted = llm.logits([*start, *end])[len(start) :]
            assert_close(torch.cat(list(logits_in_pieces(model, got))), wanted)
    assert llm.engine.cache.lengths == {}


def test_log_likelihoods_are_those_of_the_logits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 9 * 4 * VOCAB)
    tokens, model = ids(50), llm.engine.model
    targets = llm.logits(tokens).argmax(-1).tolist()
    targets[::2] = ids(25, seed=9)
    with Reading(llm, 50) as reading:
        got, likeliest = log_likelihoods(model, reading.read(tokens), targets)
    table = llm.logits(tokens).double().log_softmax(-1)
    wanted = table.gather(-1, torch.tensor(targets)[:, None])[:, 0]
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-5)
    assert torch.equal(likeliest, table.argmax(-1) == torch.tensor(targets))


def test_pages_are_given_back_after_an_error(llm: LLM) -> None:
    with pytest.raises(ValueError, match=f"the vocabulary has {VOCAB}"), Reading(llm, 4) as reading:
        reading.read([1, VOCAB])
    assert llm.engine.cache.lengths == {}


@pytest.mark.parametrize(
    ("options", "final", "words"),
    [
        ({"mask": lambda b, h, q, k: k <= q + 1, "replace_mask": True}, 8, "a token may see the one that it is to"),
        ({"max_context": 64}, 65, "65 tokens are to be read and the context ends at 64"),
    ],
)
def test_what_cannot_be_read(options: dict[str, Any], final: int, words: str, tmp_path: Path) -> None:
    tiny(tmp_path)
    with pytest.raises(ValueError, match=words):
        Reading(LLM(tmp_path, **options), final)


def test_a_tokenizer_is_needed() -> None:
    with pytest.raises(ValueError, match="random:tiny: there is no tokenizer, so no text can be read"):
        needed_tokenizer(LLM("random:tiny"))
