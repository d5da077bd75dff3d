"""A user's mask and score in every layer, through LLM: transformers under the same mask, at every position and by every
way in which tokens can come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import LLM, SamplingParams, masks, scores
from flexdecode.attention.masks import Mask
from tests.checkpoints import tiny
from tests.llm.asking import GREEDY, load
from tests.oracles import assert_close, ids

TOKENS = 60
WINDOW = 16  # of the sliding families of tests.checkpoints
HEADS = 4
Visible = Callable[[Tensor, Tensor], Tensor]


def near_or_even(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx < 3) | (kv_idx % 2 == 0)


def by_parity_of_head(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx - kv_idx < 5) | (h % 2 == 0)


def additive(shown: Tensor) -> Tensor:
    """transformers' mask, fp32 [1, H or 1, Q, L], of a bool one [H or 1, Q, L]."""
    return torch.zeros(shown.shape).masked_fill(~shown, torch.finfo(torch.float32).min)[None]


def positions(count: int = TOKENS) -> tuple[Tensor, Tensor]:
    return torch.arange(count)[:, None], torch.arange(count)


@torch.no_grad()
def wanted(model: Any, prompt: list[int], mask: Any) -> Tensor:
    """fp32 logits of transformers' model under additive masks [1, H or 1, Q, L], one or by layer type."""
    logits: Tensor = model(torch.tensor([prompt]), attention_mask=mask).logits[0].float()
    return logits


def check_every_way(llm: LLM, logits_TV: Tensor, prompt: list[int]) -> None:
    """In one prefill, in chunks, and one token at a time as decoding has it: the same logits at every position."""
    for chunk in (None, 1, 7, 33):
        assert_close(llm.logits(prompt, chunk), logits_TV)


def check_decoding(llm: LLM, model: Any, mask_of: Callable[[int], Any], prompt: list[int]) -> None:
    """Greedy decoding takes, token by token, the likeliest of transformers' logits for the text so far."""
    answer = llm.generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1, **GREEDY))
    text = [*prompt, *answer.token_ids]
    logits = wanted(model, text, mask_of(len(text)))
    for i, entry in enumerate(answer.logprobs or ()):
        row = logits[len(prompt) + i - 1].log_softmax(-1)
        assert abs(entry.logprob - float(row[entry.token_id])) < 1e-3
        assert entry.logprob >= float(row.max()) - 1e-3


def causal_and(shows: Visible) -> Callable[[int], Tensor]:
    def of(count: int) -> Tensor:
        q, k = positions(count)
        return additive(((k <= q) & shows(q, k))[None])

    return of


@pytest.mark.parametrize(
    ("mask", "shows"),
    [
        ("window(8)", lambda q, k: q - k < 8),
        ("window(8) | sinks(2)", lambda q, k: (q - k < 8) | (k < 2)),
        ("chunked(10)", lambda q, k: q // 10 == k // 10),
        (masks.dilated(9, 3), lambda q, k: (q - k < 27) & ((q - k) % 3 == 0)),
        (near_or_even, lambda q, k: (q - k < 3) | (k % 2 == 0)),
        (masks.window(20) & masks.mask(near_or_even), lambda q, k: (q - k < 20) & ((q - k < 3) | (k % 2 == 0))),
    ],
    ids=["text", "sinks", "chunked", "built-in", "function", "both"],
)
def test_a_mask_beside_the_models_own(mask: str | Mask, shows: Visible, tmp_path: Path) -> None:
    """The reports behind this: at decode a mod saw q_idx 0, or a sliced mask showed everything."""
    model, prompt = tiny(tmp_path), ids(TOKENS)
    llm = load(tmp_path, mask=mask)
    of = causal_and(shows)
    logits = wanted(model, prompt, of(TOKENS))
    assert not torch.allclose(logits, wanted(model, prompt, None), atol=0.1), "the mask must matter"
    check_every_way(llm, logits, prompt)
    check_decoding(llm, model, of, prompt[:5])


@pytest.mark.parametrize("replace", [False, True], ids=["beside", "instead"])
@pytest.mark.parametrize("family", ["gemma3_text", "mistral"])
def test_beside_or_instead_of_a_sliding_models_masks(family: str, replace: bool, tmp_path: Path) -> None:
    """Beside: full layers get the mask, sliding ones what both show. Instead: the mask alone, without causality."""
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2} if family == "gemma3_text" else {}
    model, prompt = tiny(tmp_path, family, **layers), ids(TOKENS)
    q, k = positions()
    mine = (q - k < 24) & ((k % 2 == 0) | (q - k < 2))
    if replace:
        # Looks ahead within a chunk of the prefill: only the mask says that it may.
        mine = (q // 20 == k // 20) | (k < 3)
        own = {"full_attention": mine, "sliding_attention": mine}
        llm = load(tmp_path, mask="chunked(20) | sinks(3)", replace_mask=True)
    else:
        causal = k <= q
        own = {"full_attention": causal & mine, "sliding_attention": causal & (q - k < WINDOW) & mine}
        even = masks.mask(lambda b, h, q_idx, kv_idx: (kv_idx % 2 == 0) | (q_idx - kv_idx < 2))
        llm = load(tmp_path, mask=masks.window(24) & even)
    by_type = {kind: additive(shown[None]) for kind, shown in own.items()}
    logits = wanted(model, prompt, by_type if family == "gemma3_text" else by_type["sliding_attention"])
    assert_close(llm.logits(prompt), logits)
    if not replace:
        check_every_way(llm, logits, prompt)


@pytest.mark.parametrize(
    "mask",
    [
        by_parity_of_head,
        "per_head([causal, window(5), causal, window(5)])",
        masks.per_head([masks.causal(), by_parity_of_head] * 2),
        masks.per_head([masks.causal()] * 2 + [masks.window(5)] * 2),
    ],
    ids=["function", "text", "mixed", "by group"],
)
def test_heads_may_differ(mask: str | Mask, tmp_path: Path) -> None:
    """Within a group of query heads that share keys, and between groups."""
    model, prompt = tiny(tmp_path), ids(TOKENS)
    near_heads = [2, 3] if isinstance(mask, masks.PerHead) and mask.masks[0] == mask.masks[1] else [1, 3]
    near = torch.tensor([h in near_heads for h in range(HEADS)])[:, None, None]

    def of(count: int) -> Tensor:
        q, k = positions(count)
        return additive((k <= q) & ((q - k < 5) | ~near))

    llm = load(tmp_path, mask=mask)
    check_every_way(llm, wanted(model, prompt, of(TOKENS)), prompt)
    check_decoding(llm, model, of, prompt[:9])


@pytest.mark.parametrize("attention", ["reference", "sdpa", "cpu"])
def test_every_backend_takes_the_mask(attention: str, tmp_path: Path) -> None:
    model, prompt = tiny(tmp_path), ids(TOKENS)
    logits = wanted(model, prompt, causal_and(lambda q, k: (q - k < 8) | (k % 2 == 0))(TOKENS))
    odd = masks.window(8) | masks.mask(lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0)
    llm = load(tmp_path, mask=odd, attention=attention)
    for chunk in (None, 1):
        assert_close(llm.logits(prompt, chunk), logits)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_score_comes_after_the_models_own(family: str, tmp_path: Path) -> None:
    """A bias by distance and head as an additive mask is the oracle; Gemma 2 caps its scores first. A built-in and a
    plain function of the same formula agree."""
    overrides = {"sliding_window": 200} if family == "gemma2" else {}
    model, prompt = tiny(tmp_path, family, **overrides), ids(TOKENS)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    q, k = positions()
    mask = additive((k <= q)[None]) - (slopes[:, None, None] * (q - k).clamp(min=0))[None]
    logits = wanted(model, prompt, mask)

    def plain(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx - kv_idx)

    for score in (scores.alibi(slopes), plain):
        check_every_way(load(tmp_path, score=score), logits, prompt)


def test_neighbours_do_not_change_what_a_mask_shows(tmp_path: Path) -> None:
    """b is 0 for every request: a mod cannot tell who runs beside it."""
    tiny(tmp_path)
    llm = load(tmp_path, mask=lambda b, h, q_idx, kv_idx: (q_idx - kv_idx < 6) & (b == 0))
    params = SamplingParams(max_tokens=12, ignore_eos=True, **GREEDY)
    prompts = [ids(n, seed=n) for n in (3, 40, 17)]
    alone = [llm.generate(p, params).token_ids for p in prompts]
    assert [c.token_ids for c in llm.generate_batch(prompts, params)] == alone


def test_pages_that_the_mask_hides_for_good_are_given_back(tmp_path: Path) -> None:
    tiny(tmp_path, max_position_embeddings=2048)
    llm = load(tmp_path, mask="window(64) | sinks(4)")
    group = llm.engine.cache.groups[0]
    free = group.free_pages
    stream = llm.stream(ids(1000), SamplingParams(max_tokens=200, ignore_eos=True, **GREEDY))
    for _ in range(3):  # the prefill's last chunk is given back with the first step
        next(stream)
    assert free - group.free_pages <= 4
    assert len(list(stream)) > 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mask": "per_head([causal, causal])"}, "2 masks, and there are 4 query heads"),
        ({"mask": "widnow(8)"}, r"there is no mask widnow \(did you mean window\?\)"),
        ({"mask": "window(0)"}, r"window\(0\).*at least 1"),
        ({"mask": "causal and window(8)"}, "write & in place of and"),
        ({"mask": "absent.py:mine"}, "absent.py: there is no such file"),
        ({"mask": 8}, "8 is no mask"),
        ({"mask": lambda q, k: q >= k}, r"takes \(q, k\), and is called with \(b, h, q_idx, kv_idx\)"),
        ({"replace_mask": True}, "no mask was given"),
        ({"score": scores.alibi(heads=3)}, "3 slopes, and there are 4 query heads"),
        ({"score": 8}, "8 is no score modification"),
    ],
    ids=str,
)
def test_mistakes_are_told_at_start_up(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    tiny(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        load(tmp_path, **options)
    assert "\n" not in str(caught.value)


def test_a_function_that_fails_is_named(tmp_path: Path) -> None:
    tiny(tmp_path)

    def chained(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - 8 < kv_idx <= q_idx

    with pytest.raises(ValueError, match=r"mask function chained takes the truth value of a tensor .* use & \| ~"):
        load(tmp_path, mask=chained).logits(ids(9))


def test_a_prompt_whose_tokens_see_later_ones_comes_in_one_step(tmp_path: Path) -> None:
    """Cut into chunks, a token could not see what comes in later ones, and nobody would be told."""
    model, prompt = tiny(tmp_path, "llama", max_position_embeddings=1024), ids(700)
    llm = load(tmp_path, mask="prefix_lm(600)", replace_mask=True)
    q, k = positions(700)
    shown = ((k <= q) | (k < 600))[None]
    logits = wanted(model, prompt, additive(shown))
    assert_close(llm.logits(prompt), logits)
    answer = llm.generate(prompt, SamplingParams(max_tokens=1, **GREEDY))
    assert answer.token_ids == (int(logits[-1].argmax()),)
    with pytest.raises(ValueError, match="chunk=512 cuts 700 tokens"):
        llm.logits(prompt, 512)


@pytest.mark.parametrize(
    ("mods", "words"),
    [
        ({"mask": lambda b, h, q, k: True}, "returns True, not a bool tensor"),
        ({"mask": lambda b, h, q, k: q - k}, "returns torch.int64"),
        ({"score": lambda s, b, h, q, k: (s, s)}, "returns"),
        ({"score": lambda s, b, h, q, k: s if q > k else s - 1}, "lambda"),
    ],
    ids=str,
)
def test_a_function_that_cannot_be_asked_is_refused_before_weights_are_read(
    mods: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(tmp_path, "llama")
    monkeypatch.setattr("flexdecode.models.load.WeightLoader.linear", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=words):
        LLM(str(tmp_path), **mods)
