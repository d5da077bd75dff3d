"""flexdecode as the attention of transformers models, against their own eager attention: the same logits and the same
tokens, whatever the cache, the padding and the way of generating."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import repeat_kv

import flexdecode.transformers as ours
from flexdecode.attention import batched
from flexdecode.config import FlexdecodeWarning
from tests.checkpoints import PAD, tiny

FAMILIES = ("llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen3", "phi3")
LENGTH = 40  # beyond the windows of 16
_MODELS: dict[str, Any] = {}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _model(request.param, tmp_path_factory)


@pytest.fixture
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _model("llama", tmp_path_factory)


def _model(family: str, folders: pytest.TempPathFactory) -> Any:
    if family not in _MODELS:
        _MODELS[family] = tiny(folders.mktemp(family), family, tokenizer=False)
    return _MODELS[family]


def ids(batch: int = 2, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(0, 250, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(side: str) -> tuple[Tensor, Tensor]:
    """Three sequences of 40, 23 and 2 tokens, filled up on the left or right."""
    tokens, there = ids(3), torch.zeros(3, LENGTH, dtype=torch.long)
    for i, length in enumerate((LENGTH, 23, 2)):
        there[i, slice(0, length) if side == "right" else slice(LENGTH - length, None)] = 1
    return tokens.where(there.bool(), PAD), there


@torch.no_grad()
def both(model: Any, run: Any) -> tuple[Any, Any]:
    """run() under the model's own attention, then under ours."""
    found = []
    for name in ("eager", "flexdecode"):
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
        found.append(run())
    return found[0], found[1]


def check(wanted: Tensor, got: Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(got, wanted, atol=atol, rtol=1e-4)


# logits


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_logits_of_a_whole_batch(model: Any, side: str) -> None:
    tokens, there = (ids(), None) if side == "none" else padded(side)
    seen = torch.ones_like(tokens, dtype=torch.bool) if there is None else there.bool()
    positions = None if there is None else (there.cumsum(-1) - 1).clamp(min=0)
    wanted, got = both(model, lambda: model(tokens, attention_mask=there, position_ids=positions).logits)
    check(wanted[seen], got[seen])
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_logits_step_by_step(model: Any, kind: str, side: str) -> None:
    """Prefill, three tokens one by one, five at once (as in speculation), and on beyond the window."""
    tokens, there = (ids(3, 60), None) if side == "none" else padded(side)
    if there is not None:
        tokens, there = torch.cat([tokens, ids(3, 20, seed=1)], 1), torch.cat([there, torch.ones(3, 20).long()], 1)

    def run() -> Tensor:
        cache = (
            StaticCache(config=model.config, max_cache_len=90)
            if kind == "static"
            else DynamicCache(config=model.config)
        )
        found, at = [], 0
        for count in (LENGTH, 1, 1, 1, 5, 1, 1, 10):
            stop = at + count
            mask = None if there is None else there[:, :stop]
            places = torch.arange(at, stop)[None] if there is None else (there.cumsum(-1) - 1).clamp(min=0)[:, at:stop]
            step = model(tokens[:, at:stop], attention_mask=mask, position_ids=places, past_key_values=cache)
            found.append(step.logits)
            at = stop
        return torch.cat(found, 1)

    wanted, got = both(model, run)
    seen = torch.ones_like(tokens, dtype=torch.bool) if there is None else there.bool()
    check(wanted[seen], got[seen])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_half_precision(model: Any, dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As near to the same weights in fp32 as its own attention is, or nearer. A router sends a token to all experts:
    between two that it likes the same, the last bit of anything decides, and the token's error says nothing of us."""
    tokens, there = padded("left")
    seen = there.bool()
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = module.num_experts
    model.to(dtype).float().set_attn_implementation("eager")
    with torch.no_grad():
        exact = model(tokens, attention_mask=there).logits[seen]
    try:
        wanted, got = both(model.to(dtype), lambda: model(tokens, attention_mask=there).logits.float()[seen])
    finally:
        _MODELS.pop(next(name for name, held in _MODELS.items() if held is model))
    assert (got - exact).abs().mean() < 1.2 * (wanted - exact).abs().mean() + 1e-3


# generation


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 4},
        {"use_cache": False},
    ],
    ids=lambda o: "-".join(o) or "greedy",
)
def test_the_same_tokens_are_generated(model: Any, options: dict[str, Any]) -> None:
    tokens, there = padded("left")
    if "prompt_lookup_num_tokens" in options:
        tokens, there = ids(1, 6).repeat(1, 4), torch.ones(1, 24).long()
    wanted, got = both(
        model, lambda: model.generate(tokens, attention_mask=there, do_sample=False, max_new_tokens=24, **options)
    )
    assert torch.equal(got, wanted)


def test_another_model_may_draft(llama: Any, tmp_path: Any) -> None:
    draft = tiny(tmp_path, "llama", seed=1, tokenizer=False)
    draft.set_attn_implementation("flexdecode")
    tokens = ids(1, 20)
    wanted, got = both(llama, lambda: llama.generate(tokens, do_sample=False, max_new_tokens=20, assistant_model=draft))
    assert torch.equal(got, wanted)


def test_from_pretrained(tmp_path: Any) -> None:
    model = tiny(tmp_path, "qwen3", tokenizer=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flexdecode")
    assert loaded.config._attn_implementation == "flexdecode"
    with torch.no_grad():
        check(model(ids()).logits, loaded(ids()).logits)


# other models


def test_chunked_attention(tmp_path: Any) -> None:
    """Llama 4: chunks begin at a sequence's first token, left padding or not."""
    config = transformers.Llama4TextConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_chunk_size=16,
        num_local_experts=2,
        pad_token_id=PAD,
        bos_token_id=256,
        eos_token_id=257,
    )
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).eval()
    for tokens, there in ((ids(), None), padded("left")):
        seen = torch.ones_like(tokens, dtype=torch.bool) if there is None else there.bool()
        wanted, got = both(model, lambda t=tokens, m=there: model(t, attention_mask=m).logits)
        check(wanted[seen], got[seen])
    tokens, there = padded("left")
    for kind in ("dynamic", "static"):
        options = {"do_sample": False, "max_new_tokens": 20, "cache_implementation": kind}
        wanted, got = both(model, lambda o=options: model.generate(tokens, attention_mask=there, **o))
        assert torch.equal(got, wanted)


def test_an_encoder_sees_both_ways(tmp_path: Any) -> None:
    config = transformers.BertConfig(
        vocab_size=260, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    tokens, there = padded("right")
    for mask in (None, there):
        wanted, got = both(model, lambda m=mask: model(tokens, attention_mask=m).last_hidden_state)
        seen = torch.ones_like(there) if mask is None else mask
        check(wanted[seen.bool()], got[seen.bool()])


def test_an_encoder_and_a_decoder(tmp_path: Any) -> None:
    config = transformers.BartConfig(
        vocab_size=260,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        pad_token_id=PAD,
        forced_eos_token_id=None,
    )
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).eval()
    tokens, there = padded("right")
    wanted, got = both(model, lambda: model(tokens, attention_mask=there, decoder_input_ids=ids(3, 9)).logits)
    check(wanted, got)
    wanted, got = both(model, lambda: model.generate(tokens, attention_mask=there, do_sample=False, max_new_tokens=12))
    assert torch.equal(got, wanted)


def test_packed_sequences(llama: Any) -> None:
    """Positions that begin anew tell transformers to keep sequences of one row apart."""
    positions = torch.cat([torch.arange(13), torch.arange(27)])[None]
    wanted, got = both(llama, lambda: llama(ids(1), position_ids=positions, use_cache=False).logits)
    check(wanted, got)
    with torch.no_grad():
        check(llama(ids(1)[:, 13:], use_cache=False).logits, got[:, 13:])


# the mask


@pytest.mark.parametrize("kind", ["bool", "float", "bias", "per head"])
def test_a_mask_of_the_users_own(llama: Any, kind: str) -> None:
    """4-D: bool, or added to scores; eager wants it added."""
    dice = torch.Generator().manual_seed(0)
    seen = torch.ones(LENGTH, LENGTH).tril().bool() & (torch.rand(2, 4, LENGTH, LENGTH, generator=dice) < 0.6)
    seen = (seen | torch.eye(LENGTH).bool())[:, : 4 if kind == "per head" else 1]
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    if kind == "bias":
        added = torch.where(seen, torch.rand(seen.shape, generator=dice), added)
    llama.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = llama(ids(), attention_mask=added).logits
        llama.set_attn_implementation("flexdecode")
        got = llama(ids(), attention_mask=seen if kind == "bool" else added).logits
    check(wanted, got)


def test_one_plan_serves_all_layers(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    real = batched.plan_batch
    monkeypatch.setattr(batched, "plan_batch", lambda *args: planned.append(args) or real(*args))  # type: ignore[func-returns-value]
    llama.set_attn_implementation("flexdecode")
    with torch.no_grad():
        llama(ids())
    assert len(planned) == 1


# the function


def test_every_argument_at_once() -> None:
    """softcap, position_bias, sinks, scaling, values of another size, against the formula."""
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 30, 16), torch.randn(2, 2, 30, 24)
    bias, sinks = torch.randn(1, 4, 5, 30), torch.randn(4)
    mask = ours.step_mask(2, 5, 30, 25, 0)
    out, weights = ours.attention_forward(
        nn.Module(), q, k, v, mask, scaling=0.3, softcap=2.0, s_aux=sinks, position_bias=bias, position_ids=None
    )
    scores = torch.tanh(q @ repeat_kv(k, 2).mT * 0.3 / 2) * 2 + bias
    scores = scores.masked_fill(torch.arange(30) > torch.arange(25, 30)[:, None], -math.inf)
    p = torch.cat([scores, sinks[None, :, None, None].expand(2, 4, 5, 1)], -1).softmax(-1)[..., :30]
    check((p @ repeat_kv(v, 2)).transpose(1, 2), out, 1e-5)
    assert weights is None


@pytest.mark.parametrize(("queries", "is_causal"), [(5, True), (5, False), (5, None), (1, True)])
def test_without_a_mask(queries: int, is_causal: bool | None) -> None:
    """As under sdpa: several queries are causal unless the module is not, one sees all."""
    q, k, v = torch.randn(2, 4, queries, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16)
    module = nn.Module()
    out, _ = ours.attention_forward(module, q, k, v, None, is_causal=is_causal)
    causally = queries > 1 and is_causal is not False
    wanted = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causally, enable_gqa=True)
    check(wanted.transpose(1, 2), out, 1e-5)


Q, K = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 9, 16)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"query": Q.double()}, r"query is torch.float64; flexdecode attention takes torch.float32"),
        ({"query": Q.to("meta")}, r"on meta.*use sdpa"),
        ({"query": Q.clone().requires_grad_()}, r"no gradient.*no_grad"),
        ({"dropout": 0.1}, r"no dropout, got 0.1"),
        ({"output_attentions": True}, r"output_attentions=True.*eager"),
        ({"head_mask": torch.ones(4)}, "head_mask"),
        ({"attention_mask": ours.step_mask(2, 3, 8, 5, 0)}, r"\(2, 3, 8\), a layer has \(2, 3, 9\)"),
        ({"attention_mask": torch.ones(2, 1, 3, 8)}, r"\[2, 1, 3, 8\], a layer has \[2, 4, 3, 9\]"),
        ({"attention_mask": torch.ones(2, 9)}, r"\[2, 9\]"),
        ({"attention_mask": "causal"}, "is a str"),
        ({"sliding_window": 4}, "sliding_window is 4, there are 9 keys"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_cannot_be_is_refused(change: dict[str, Any], told: str) -> None:
    given = {"query": Q, "key": K, "value": K, "attention_mask": None} | change
    with pytest.raises(ValueError, match=told):
        ours.attention_forward(nn.Module(), **given)


def test_a_model_that_trains_is_refused(llama: Any) -> None:
    llama.set_attn_implementation("flexdecode")
    with pytest.raises(ValueError, match="no gradient"):
        llama(ids())


def test_weights_are_refused(llama: Any) -> None:
    llama.set_attn_implementation("flexdecode")
    with torch.no_grad(), pytest.raises(ValueError, match="output_attentions"):
        llama(ids(), output_attentions=True)


def test_without_kernels_it_says_so_once(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batched._warn_once.cache_clear()
    monkeypatch.setattr(batched, "missing_kernels", lambda _: "no C++ compiler was found")
    llama.set_attn_implementation("flexdecode")
    with torch.no_grad():
        with pytest.warns(FlexdecodeWarning, match="no C\\+\\+ compiler was found"):
            llama(ids())
        with warnings.catch_warnings():
            warnings.simplefilter("error", FlexdecodeWarning)
            llama(ids())
