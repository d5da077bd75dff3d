"""Batches, interleaved streams, what a request leaves behind, options, statistics."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from flexdecode import LLM, SamplingParams
from tests.checkpoints import PAD, byte_tokenizer, edit_config, puppet, tiny
from tests.llm.asking import GREEDY, load
from tests.oracles import expected, ids


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


def test_pad_tokens_are_ordinarydistinct(tmp_path: Path) -> None:
    """B66: there is no padding here, so a prompt that holds the padding id is read as it stands."""
    model = tiny(tmp_path)
    prompt = [PAD, *ids(9), PAD]
    assert (load(tmp_path).logits(prompt) - expected(model, prompt)).abs().max() < 1e-3


def test_describe_tells_what_was_chosen(tmp_path: Path) -> None:
    tiny(tmp_path, "gemma2")
    report = load(tmp_path).describe()
    assert report["family"] == "gemma2"
    assert set(report["attention_backends"].values()) == {"cpu"}
    assert report["max_context"] == 256
    edit_config(tmp_path, attn_logit_softcapping=None)
    assert set(load(tmp_path).describe()["attention_backends"].values()) == {"cpu"}


def test_a_chat_computes_what_is_new_in_a_turn(tmp_path: Path) -> None:
    """The second turn quotes the first answer; its tokens are known by what they are, not by who brought them."""
    said = "".join(chr(n) for n in range(48, 123))  # 75 bytes, each once
    puppet(tmp_path, said, prompt_last=ord("\n"))
    turns = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    byte_tokenizer(tmp_path, turns)
    llm = load(tmp_path)
    talk = [{"role": "user", "content": "Count!" * 12}]
    first = llm.chat(talk, SamplingParams(max_tokens=75, **GREEDY))
    assert (first.text, first.stats.reused_tokens) == (said, 0)
    prompt = len("user: \n") + 72
    # The template writes "assistant: " before the answer, so its tokens stand elsewhere: one page is common.
    talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And on."}]
    second = llm.chat(talk, SamplingParams(max_tokens=75, **GREEDY))
    assert (second.text, second.stats.reused_tokens) == (said, prompt // 64 * 64)
    plain = "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
    byte_tokenizer(tmp_path, plain)
    llm = load(tmp_path)
    assert llm.chat(talk[:1], SamplingParams(max_tokens=75, **GREEDY)).text == said
    second = llm.chat(talk, SamplingParams(max_tokens=75, **GREEDY))
    assert (second.text, second.stats.reused_tokens) == (said, (73 + 74) // 64 * 64)
