"""LLM end to end on checkpoints whose text and distribution the test chose."""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexdecode import LLM, SamplingParams
from flexdecode.generation.results import Chunk, Completion
from tests.checkpoints import EOS, EOT, PAD, VOCAB, byte_tokenizer, dist, edit_config, edit_tensors, puppet, tiny
from tests.oracles import expected, ids

GREEDY = {"temperature": 0.0}
TEMPLATE = "{% for m in messages %}{{ '<bos>' if loop.first else '' }}{{ m.content }}{% endfor %}"


def load(d: Path, **options: Any) -> LLM:
    return LLM(d, dtype="fp32", **options)


def joined(chunks: list[Chunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def both_ways(llm: LLM, prompt: str | list[int], params: SamplingParams) -> Completion:
    """The completion, after checking that the stream says exactly the same."""
    whole = llm.generate(prompt, params)
    chunks = list(llm.stream(prompt, params))
    assert joined(chunks) == whole.text
    assert tuple(t for chunk in chunks for t in chunk.token_ids) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == whole.finish_reason
    assert chunks[-1].stats is not None
    return whole


# Ends of an answer (STP)


@pytest.mark.parametrize("where", ["generation_config", "config list", "config int", "tokenizer"])
def test_the_end_of_turn_is_found_wherever_it_is_named(where: str, tmp_path: Path) -> None:
    """B81: a list in generation_config.json was ignored, or replaced the tokenizer's own."""
    eos: Any = {"generation_config": 5, "config list": [EOS, EOT], "config int": EOT, "tokenizer": 5}[where]
    end = EOS if where == "tokenizer" else EOT
    puppet(tmp_path, "abc", eos=eos, end=end)
    if where == "generation_config":
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{EOS}, {EOT}]}}')
    else:
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
    answer = both_ways(load(tmp_path), "<bos>", SamplingParams(max_tokens=20, **GREEDY))
    assert (answer.text, answer.finish_reason) == ("abc", "stop")
    assert answer.token_ids[-1] == end


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("DEFG", "ABC"),
        ("HIJ", "ABCDEFG"),
        (["DEX", "EFG"], "ABCD"),
        ("XYZ", "ABCDEFGHIJ"),
        ("HIJK", "ABCDEFGHIJ"),
        ("ABCDEFGHIJ", ""),
        ([], "ABCDEFGHIJ"),
        (["x", "y", "z", "w", "GH"], "ABCDEF"),
    ],
)
def test_stop_strings_across_tokens(stop: Any, text: str, tmp_path: Path) -> None:
    """B82: one token a byte, so every stop string spans tokens; no chunk may hold a part of a match."""
    puppet(tmp_path, "ABCDEFGHIJ")
    answer = both_ways(load(tmp_path), "<bos>", SamplingParams(max_tokens=50, stop=stop, **GREEDY))
    assert (answer.text, answer.finish_reason) == (text, "stop")


@pytest.mark.parametrize(("stop", "text"), [("ZZZ", "ab €😀z"), ("€", "ab "), ("😀z", "ab €")])
def test_stop_strings_among_multibyte_characters(stop: str, text: str, tmp_path: Path) -> None:
    """B83, B86: the hold-back cut a character in two."""
    puppet(tmp_path, _ids("ab €😀z"))
    assert both_ways(load(tmp_path), "<bos>", SamplingParams(max_tokens=50, stop=stop, **GREEDY)).text == text


def _ids(text: str) -> list[int]:
    encoded = list(text.encode())
    assert len(set(encoded)) == len(encoded)
    return encoded


@pytest.mark.parametrize(
    ("options", "reason", "text"),
    [
        ({"max_tokens": 2}, "length", "ab"),
        ({"max_tokens": 3}, "length", "abc"),
        ({"max_tokens": 4}, "stop", "abc"),
        ({"max_tokens": 10}, "stop", "abc"),
        ({"max_tokens": 10, "stop": "b"}, "stop", "a"),
        ({"max_tokens": 0}, "length", ""),
        ({"max_tokens": 10, "stop_token_ids": [ord("b")]}, "stop", "a"),
        ({"max_tokens": 10, "stop": "z"}, "stop", "abc"),
        ({}, "stop", "abc"),
    ],
)
def test_finish_reasons(options: dict[str, Any], reason: str, text: str, tmp_path: Path) -> None:
    """B84: null on a natural end, or stop when the budget ran out."""
    puppet(tmp_path, "abc")
    answer = both_ways(load(tmp_path), "<bos>", SamplingParams(**options, **GREEDY))
    assert (answer.finish_reason, answer.text) == (reason, text)


def test_ignore_eos_and_min_tokens(tmp_path: Path) -> None:
    """B85: ends named by generation_config were added to the request's own and so never ignored."""
    puppet(tmp_path, "abc", eos=[EOS, EOT], end=EOT)
    llm = load(tmp_path)
    answer = both_ways(llm, "<bos>", SamplingParams(max_tokens=10, ignore_eos=True, **GREEDY))
    assert (len(answer.token_ids), answer.finish_reason) == (10, "length")
    answer = both_ways(llm, "<bos>", SamplingParams(max_tokens=10, min_tokens=5, **GREEDY))
    assert len(answer.token_ids) >= 5
    assert not {EOS, EOT} & set(answer.token_ids[:4])
    stopped = both_ways(llm, "<bos>", SamplingParams(max_tokens=10, min_tokens=3, stop="b", **GREEDY))
    assert stopped.text.startswith("abc")


def test_generation_ends_at_the_context(tmp_path: Path) -> None:
    """B46, B48: prompt and new tokens together are at most max_context; the last one needs no room in the cache."""
    puppet(tmp_path, "a", end=97)
    llm = load(tmp_path, max_context=32)
    endless = {"ignore_eos": True, **GREEDY}
    for prompt, new in ((31, 1), (30, 2), (1, 31), (16, 16)):
        answer = both_ways(llm, [97] * prompt, SamplingParams(max_tokens=new, **endless))
        assert (len(answer.token_ids), answer.finish_reason) == (new, "length")
        open_ended = llm.generate([97] * prompt, SamplingParams(**endless))
        assert (len(open_ended.token_ids), open_ended.finish_reason) == (32 - prompt, "length")
    for prompt, new in ((32, 1), (31, 2), (1, 32), (1, 10**12)):
        with pytest.raises(ValueError, match=rf"{prompt} prompt tokens and max_tokens={new} .*32"):
            llm.generate([97] * prompt, SamplingParams(max_tokens=new, **endless))
    with pytest.raises(ValueError, match=r"33 tokens.*32"):
        llm.generate([97] * 33, SamplingParams(**endless))
    assert llm.generate([97] * 32, SamplingParams(**endless)).finish_reason == "length"


# Text (DTK, TPL)


@pytest.mark.parametrize("budget", [4, 5, 6, 7, 8, 20])
def test_multibyte_characters_in_a_stream(budget: int, tmp_path: Path) -> None:
    """B86: U+FFFD may appear once, at a real cut, and the same in both modes."""
    puppet(tmp_path, _ids("ab €😀z"))
    answer = both_ways(load(tmp_path), "<bos>", SamplingParams(max_tokens=budget, **GREEDY))
    assert answer.text.count("\ufffd") <= 1
    assert "ab €😀z".startswith(answer.text.rstrip("\ufffd"))


def test_invalid_utf8_never_raises(tmp_path: Path) -> None:
    """B87."""
    chain = [0xFF, 0x41, 0xC3, 0x20, 0x42, 0xE2, 0x82, 0x43]
    puppet(tmp_path, chain)
    llm = load(tmp_path)
    assert llm.tokenizer is not None
    assert both_ways(llm, "<bos>", SamplingParams(max_tokens=20, **GREEDY)).text == bytes(chain).decode(
        errors="replace"
    )


def test_chat_has_one_bos_and_equals_generate(tmp_path: Path) -> None:
    """B102."""
    puppet(tmp_path, "xyz", prompt_last=ord("d"))
    byte_tokenizer(tmp_path, TEMPLATE)
    llm = load(tmp_path)
    messages = [{"role": "system", "content": "ab"}, {"role": "user", "content": "cd"}]
    answer = llm.chat(messages, SamplingParams(max_tokens=9, **GREEDY))
    assert (answer.text, answer.prompt_tokens) == ("xyz", 5)
    assert joined(list(llm.stream_chat(messages, SamplingParams(max_tokens=9, **GREEDY)))) == "xyz"


def test_chat_without_a_template_says_so(tmp_path: Path) -> None:
    """B103."""
    puppet(tmp_path, "xyz")
    llm = load(tmp_path)
    with pytest.raises(ValueError, match="chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    assert llm.generate("<bos>", SamplingParams(max_tokens=9, **GREEDY)).text == "xyz"


def test_a_checkpoint_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    tiny(tmp_path, tokenizer=False)
    llm = load(tmp_path)
    answer = llm.generate(ids(5), SamplingParams(max_tokens=4, ignore_eos=True, **GREEDY))
    assert (answer.text, len(answer.token_ids)) == ("", 4)
    for call in (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "x"}])):
        with pytest.raises(ValueError, match="tokenizer"):
            call()


# Sampling and penalties through the model (SMP, PEN)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-10, 1e-5])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_temperature_zero_and_nearly_zero_are_greedy(temperature: float, dtype: str, tmp_path: Path) -> None:
    """B71: 12 / 1e-5 is infinite in fp16, and infinity minus infinity is NaN."""
    dist(tmp_path, {97: 0.5, 98: 0.3, 99: 0.2})
    answer = LLM(tmp_path, dtype=dtype).generate("<bos>", SamplingParams(max_tokens=20, temperature=temperature))
    assert answer.text == "a" * 20


def test_every_zero_has_its_meaning(tmp_path: Path) -> None:
    """B72: value or default turns a 0 into the default."""
    probs = {97: 0.25, 98: 0.25, 99: 0.25, 100: 0.25}
    dist(tmp_path, probs)
    llm = load(tmp_path)

    def texts(**options: Any) -> Counter[str]:
        return Counter(llm.generate("<bos>", SamplingParams(max_tokens=200, **options)).text)

    assert len(texts(temperature=1.0, top_p=0.0)) == 1
    assert len(texts(temperature=0.0)) == 1
    assert len(texts(temperature=1.0, top_k=0, min_p=0.0)) == 4
    first, again = (
        llm.generate("<bos>", SamplingParams(max_tokens=50, temperature=1.0, seed=0)).text for _ in range(2)
    )
    assert first == again
    other = llm.generate("<bos>", SamplingParams(max_tokens=50, temperature=1.0, seed=1)).text
    assert other != first


def test_samples_follow_the_distribution(tmp_path: Path) -> None:
    probs = {97: 0.5, 98: 0.3, 99: 0.2}
    dist(tmp_path, probs)
    text = load(tmp_path).generate("<bos>", SamplingParams(max_tokens=400, temperature=1.0, seed=3)).text
    counts = Counter(text)
    for token, p in probs.items():
        deviation = math.sqrt(400 * p * (1 - p))
        assert abs(counts[chr(token)] - 400 * p) < 5 * deviation


def test_seed_and_n(tmp_path: Path) -> None:
    """B78: choices differ from each other, the same call repeats them, and n with temperature 0 gives n equal ones."""
    dist(tmp_path, {97: 0.5, 98: 0.5})
    llm = load(tmp_path)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=7, n=3)
    first, second = ([c.text for c in llm.generate_batch(["<bos>"], params)] for _ in range(2))
    assert first == second
    assert len(set(first)) == 3
    assert first[0] == llm.generate("<bos>", SamplingParams(max_tokens=30, temperature=1.0, seed=7)).text
    equal = llm.generate_batch(["<bos>"], SamplingParams(max_tokens=5, temperature=0.0, n=3))
    assert len(equal) == 3
    assert len({c.text for c in equal}) == 1
    with pytest.raises(ValueError, match="n=3"):
        llm.generate("<bos>", params)


def test_penalties_and_what_they_count(tmp_path: Path) -> None:
    """B79: presence and frequency count the output only, repetition the prompt too."""
    dist(tmp_path, {97: 0.4, 98: 0.35, 99: 0.25})
    llm = load(tmp_path)

    def text(prompt: str, **options: Any) -> str:
        return llm.generate(prompt, SamplingParams(max_tokens=4, temperature=0.0, **options)).text

    assert text("aaaa") == "aaaa"
    assert text("aaaa", presence_penalty=0.2)[0] == "a"
    assert text("aaaa", frequency_penalty=0.2)[:2] == "ab"
    # log-probabilities are negative, so they are multiplied: a falls to log(.4) · 2
    assert text("aaaa", repetition_penalty=2.0)[0] == "b"
    assert text("b", repetition_penalty=1.01)[0] == "a"


def test_logit_bias_forces_and_bans(tmp_path: Path) -> None:
    """B80."""
    dist(tmp_path, {97: 0.6, 98: 0.4})
    llm = load(tmp_path)
    for bias, text in (({97: -100}, "bbb"), ({99: 100}, "ccc"), ({98: 1}, "bbb")):
        assert llm.generate("<bos>", SamplingParams(max_tokens=3, temperature=0, logit_bias=bias)).text == text
    for field, bad in (("logit_bias", {VOCAB: 5}), ("stop_token_ids", [99999])):
        with pytest.raises(ValueError, match=f"{field}.*{VOCAB - 1}"):
            llm.generate("<bos>", SamplingParams(max_tokens=3, **{field: bad}))


def test_logprobs_are_of_the_raw_logits(tmp_path: Path) -> None:
    dist(tmp_path, {97: 0.5, 98: 0.3, 99: 0.2})
    llm = load(tmp_path)
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3, logit_bias={98: 50}, stop="zz")
    answer = both_ways(llm, "<bos>", params)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids) == 4
    for entry in answer.logprobs:
        assert entry.token_id == 98
        assert entry.logprob == pytest.approx(math.log(0.3), abs=1e-3)
        assert [t for t, _ in entry.top] == [97, 98, 99]
        assert [p for _, p in entry.top] == pytest.approx([math.log(p) for p in (0.5, 0.3, 0.2)], abs=1e-3)
    chunks = list(llm.stream("<bos>", params))
    assert sum(len(chunk.logprobs or ()) for chunk in chunks) == 4


def test_defaults_come_from_generation_config(tmp_path: Path) -> None:
    dist(tmp_path, {97: 0.5, 98: 0.5})
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.7, "max_new_tokens": 12}')
    llm = load(tmp_path)
    assert len(set(llm.generate("<bos>").text)) == 2
    assert len(llm.generate("<bos>").text) == 12
    assert len(set(llm.generate("<bos>", SamplingParams(temperature=0.0)).text)) == 1
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "max_new_tokens": 100000}')
    plain = load(tmp_path, max_context=40)
    assert set(plain.generate("<bos>").text) == {"a"}
    assert len(plain.generate("<bos>").token_ids) == 39


# Numbers that are none (NUM)


def test_a_nan_in_the_logits_ends_that_request_only(tmp_path: Path) -> None:
    """B65: token 0 for ever, or the whole loop dead."""
    tiny(tmp_path)

    def poison(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["model.embed_tokens.weight"][7] = float("nan")
        return tensors

    edit_tensors(tmp_path, poison)
    llm = load(tmp_path)
    params = SamplingParams(max_tokens=5, ignore_eos=True, logit_bias={7: -100}, **GREEDY)
    healthy = llm.generate([3, 4, 5], params).token_ids
    for options in (params, SamplingParams(max_tokens=5, temperature=1.0)):
        with pytest.raises(ValueError, match="NaN"):
            llm.generate([3, 7, 5], options)
    sick = llm.engine.add([3, 7, 5], params.resolve({}))
    well = llm.engine.add([3, 4, 5], params.resolve({}))
    while llm.engine.busy:
        llm.engine.step()
    assert sick.error is not None
    assert tuple(well.output_ids) == healthy


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_softcap_holds_scores_that_would_overflow(dtype: str, tmp_path: Path) -> None:
    """B63: scores beyond 5000 before the cap; tanh by exp overflows."""
    model = tiny(tmp_path, "gemma2", gain=1.0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(60)
            layer.self_attn.k_proj.weight.mul_(60)
    model.save_pretrained(tmp_path)
    prompt = ids(40)
    got, wanted = LLM(tmp_path, dtype=dtype).logits(prompt), expected(model, prompt)
    assert torch.isfinite(got).all()
    if dtype == "fp32":
        assert (got - wanted).abs().max() < 1e-3


def test_long_prompts_in_bfloat16_keep_their_positions(tmp_path: Path) -> None:
    """B62: frequencies or positions cast to bf16 are off by whole turns at a few hundred tokens. The model's fp32
    answer is the oracle: beside it, late positions must do no worse than early ones."""
    tiny(tmp_path, num_hidden_layers=1, head_dim=128, max_position_embeddings=4096, rope_theta=5e5, gain=1.5)
    prompt = ids(2048)
    exact, rounded = (LLM(tmp_path, dtype=d).logits(prompt) for d in ("fp32", "bf16"))
    error = (exact - rounded).abs().mean(-1)
    assert error[1024:].mean() < 2 * error[64:256].mean()


# Batches and lives


def test_a_batch_answers_as_single_requests_do(tmp_path: Path) -> None:
    tiny(tmp_path, "gemma3_text")
    llm = load(tmp_path)
    prompts = [ids(n, seed=n) for n in (1, 5, 9, 40, 100)]
    params = [
        SamplingParams(max_tokens=16, ignore_eos=True, temperature=t, seed=s)
        for t, s in ((0.0, None), (1.0, 1), (1e-7, None), (2.0, 3), (0.0, None))
    ]
    single = [llm.generate(p, q).token_ids for p, q in zip(prompts, params, strict=True)]
    batch = [c.token_ids for c in llm.generate_batch(prompts, params)]
    assert batch == single
    for size in (4, 1, 3, 5):
        assert [c.token_ids for c in llm.generate_batch(prompts[:size], params[:size])] == single[:size]


def test_answers_do_not_depend_on_the_budget(tmp_path: Path) -> None:
    """B47: each answer is a prefix of the longest."""
    tiny(tmp_path, "gemma2")
    llm = load(tmp_path)
    prompt = ids(10)
    longest = llm.generate(prompt, SamplingParams(max_tokens=130, ignore_eos=True, **GREEDY)).token_ids
    for budget in (1, 2, 7, 8, 9, 63, 64, 65, 128, 129):
        assert (
            llm.generate(prompt, SamplingParams(max_tokens=budget, ignore_eos=True, **GREEDY)).token_ids
            == longest[:budget]
        )


def test_nothing_is_left_after_a_request(tmp_path: Path) -> None:
    """A, B, A gives the same A; an abandoned stream and a refused request give back what they held."""
    tiny(tmp_path)
    llm = load(tmp_path)
    params = SamplingParams(max_tokens=20, ignore_eos=True, **GREEDY)
    free = llm.engine.cache.free_tokens()
    first = llm.generate(ids(30), params).token_ids
    llm.generate(ids(70, seed=5), params)
    stream = llm.stream(ids(12), params)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="264"):
        llm.generate([264], params)
    with pytest.raises(ValueError, match="-1"):
        llm.generate([-1], params)
    with pytest.raises(ValueError, match="empty"):
        llm.generate([], params)
    with pytest.raises(ValueError, match="empty"):
        llm.generate_batch([ids(5), []], params)
    assert not llm.engine.busy
    assert llm.engine.cache.free_tokens() == free
    assert llm.generate(ids(30), params).token_ids == first


def test_two_streams_at_once(tmp_path: Path) -> None:
    tiny(tmp_path)
    llm = load(tmp_path)
    params = SamplingParams(max_tokens=15, ignore_eos=True, **GREEDY)
    wanted = [llm.generate(p, params).text for p in (ids(9), ids(33, seed=2))]
    streams = [llm.stream(p, params) for p in (ids(9), ids(33, seed=2))]
    texts = ["", ""]
    for _ in range(100):
        for i, stream in enumerate(streams):
            chunk = next(stream, None)
            texts[i] += chunk.text if chunk else ""
    assert texts == wanted


@pytest.mark.parametrize("prompt", [12, 30])
def test_longrope_renews_its_keys_when_the_text_grows_long(prompt: int, tmp_path: Path) -> None:
    """B49: short and long factors change every key, so keys cached under the one are wrong under the other."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0, 8, 16, 32] * 4}
    model = tiny(
        tmp_path,
        "phi3",
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={**rope, "rope_theta": 10000.0, "original_max_position_embeddings": 16, "factor": 4.0},
    )
    llm = load(tmp_path)
    params = SamplingParams(max_tokens=12, ignore_eos=True, **GREEDY)
    batch = llm.generate_batch([ids(prompt), ids(10, seed=4)], params)
    for start, answer in ((ids(prompt), batch[0]), (ids(10, seed=4), batch[1])):
        sequence = list(start)
        for token in answer.token_ids:
            assert expected(model, sequence)[-1].argmax() == token
            sequence.append(token)


def test_stats_add_up(tmp_path: Path) -> None:
    puppet(tmp_path, "abc")
    llm = load(tmp_path)
    start = time.perf_counter()
    answer = llm.generate("<bos>", SamplingParams(max_tokens=9, **GREEDY))
    wall = time.perf_counter() - start
    s = answer.stats
    assert (s.prompt_tokens, s.new_tokens) == (1, 4)
    assert 0 < s.prefill_seconds <= s.time_to_first_token
    assert s.time_to_first_token + s.decode_seconds <= wall


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int3"}, "dtype 'int3'.*bf16"),
        ({"kv_dtype": "fp4"}, "kv_dtype 'fp4'.*int8"),
        ({"device": "toaster"}, "toaster"),
        ({"attention": "magic"}, "magic.*reference"),
        ({"max_context": 0}, "max_context"),
        ({"max_context": 512}, "512.*256"),
        ({"threads": 0}, "threads"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    tiny(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        LLM(tmp_path, **options)
    assert "\n" not in str(caught.value)


def test_a_forced_backend_that_cannot_serve_says_why(tmp_path: Path) -> None:
    tiny(tmp_path, "gpt_oss")
    with pytest.raises(ValueError, match="sinks"):
        LLM(tmp_path, attention="sdpa")


def test_int8_cache_stays_close(tmp_path: Path) -> None:
    tiny(tmp_path, "qwen3")
    prompt = ids(60)
    exact, rounded = (load(tmp_path, kv_dtype=kv).logits(prompt) for kv in ("auto", "int8"))
    assert 0 < (exact - rounded).abs().mean() < 0.05 * exact.std()


def test_pad_tokens_are_ordinary_ids(tmp_path: Path) -> None:
    """B66: there is no padding here, so a prompt that holds the padding id is read as it stands."""
    model = tiny(tmp_path)
    prompt = [PAD, *ids(9), PAD]
    assert (load(tmp_path).logits(prompt) - expected(model, prompt)).abs().max() < 1e-3


def test_describe_tells_what_was_chosen(tmp_path: Path) -> None:
    tiny(tmp_path, "gemma2")
    report = load(tmp_path).describe()
    assert report["family"] == "gemma2"
    assert set(report["attention_backends"].values()) == {"reference"}
    assert report["max_context"] == 256
    edit_config(tmp_path, attn_logit_softcapping=None)
    assert set(load(tmp_path).describe()["attention_backends"].values()) == {"sdpa"}
