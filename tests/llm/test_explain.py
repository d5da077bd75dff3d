"""What a decode step reads, counted by hand; no rate and no time is asserted beyond how they hang together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexdecode import LLM
from flexdecode.cli.main import main
from flexdecode.generation.explain import Explanation
from flexdecode.models.linear import Linear
from tests.checkpoints import tiny
from tests.llm.asking import load
from tests.oracles import ids

KV = 2 * 2 * 32 * 4  # bytes a token and layer: keys and values of two kv heads of 32, fp32


def linear_bytes(llm: LLM) -> int:
    """Of every product, the parts of a stacked one once."""
    modules = list(llm.engine.model.named_modules())
    stacked = [name for name, m in modules if type(m).__name__ == "StackedLinear"]
    inner = {name for name, _ in modules for outer in stacked if name.startswith(f"{outer}.")}
    return sum(m.nbytes for name, m in modules if isinstance(m, Linear) and name not in inner)


def consistent(found: Explanation) -> None:
    assert found.read_bytes_per_second > 0
    assert found.floor_seconds == pytest.approx((found.weights_bytes + found.kv_bytes) / found.read_bytes_per_second)
    assert found.floor_tokens_per_second == pytest.approx(1 / found.floor_seconds)
    assert found.kv_bytes == sum(x.read_bytes for x in found.kv)
    assert json.loads(json.dumps(found.as_dict()))["kv_skipped_bytes"] == found.kv_skipped_bytes


def test_weights_and_visible_keys_are_counted(tmp_path: Path) -> None:
    tiny(tmp_path)
    llm = load(tmp_path)
    found = llm.explain(100)
    consistent(found)
    norms, embedding_row = 9 * 128 * 4, 128 * 4
    assert found.weights_bytes == linear_bytes(llm) + norms + embedding_row
    assert found.experts is None
    assert [(x.mask, x.layers, x.keys, x.read_bytes, x.skipped_bytes) for x in found.kv] == [
        ("causal()", 4, 100, 4 * 100 * KV, 0)
    ]
    assert (found.step_seconds, found.fraction_of_floor) == (None, None)


def test_layers_are_told_by_their_mask(tmp_path: Path) -> None:
    tiny(tmp_path, "gemma3_text", layer_types=["sliding_attention"] * 3 + ["full_attention"])
    found = load(tmp_path).explain(100)
    assert [(x.mask, x.layers, x.keys, x.read_bytes, x.skipped_bytes) for x in found.kv] == [
        ("causal() & window(16)", 3, 16, 3 * 16 * KV, 3 * 84 * KV),
        ("causal()", 1, 100, 100 * KV, 0),
    ]
    assert found.kv_skipped_bytes == 3 * 84 * KV


def test_a_users_mask_spares_bytes(tmp_path: Path) -> None:
    tiny(tmp_path)
    found = load(tmp_path, mask="window(10) | sinks(4)").explain(200)
    (kv,) = found.kv
    assert (kv.keys, kv.read_bytes, kv.skipped_bytes) == (14, 4 * 14 * KV, 4 * 186 * KV)
    half = load(tmp_path, mask="per_head([window(10), causal, window(10), window(20)])", kv_dtype="int8").explain(200)
    (kv,) = half.kv
    assert (kv.keys, kv.read_bytes) == ((200 + 20) / 2, 4 * (200 + 20) * (2 * 32 + 8))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_of_experts_only_those_that_a_token_uses(family: str, tmp_path: Path) -> None:
    tiny(tmp_path, family)
    llm = load(tmp_path)
    found = llm.explain(50)
    assert found.experts == (2, 4)
    experts = sum(
        m.nbytes
        for layer in llm.engine.model.layers
        for group in (layer.feed_forward.gate_up, layer.feed_forward.down)  # type: ignore[union-attr]
        for m in group  # type: ignore[union-attr]
    )
    vectors = found.weights_bytes - (linear_bytes(llm) - experts // 2)
    assert 0 < vectors < 20_000, "norms and a row of the embedding"


def test_a_measured_step_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    tiny(tmp_path)
    llm = load(tmp_path)
    free = llm.engine.cache.free_tokens()
    for context in (4, 60, llm.max_context):
        found = llm.explain(context, measure=True)
        consistent(found)
        assert found.step_seconds is not None
        assert found.fraction_of_floor == pytest.approx(found.floor_seconds / found.step_seconds)
    assert llm.engine.cache.free_tokens() == free
    assert not llm.engine.busy


def test_mistakes_are_told(tmp_path: Path) -> None:
    tiny(tmp_path)
    llm = load(tmp_path)
    for context, measure, words in (
        (1, False, "at 1 tokens cannot be explained: wants 2 to 256"),
        (257, False, "at 257 .* 2 to 256"),
        (3, True, "at 3 tokens cannot be measured: wants 4 to 256"),
    ):
        with pytest.raises(ValueError, match=words):
            llm.explain(context, measure=measure)
    stream = llm.stream(ids(9))
    next(stream)
    with pytest.raises(ValueError, match="while requests are running"):
        llm.explain(60, measure=True)
    llm.explain(60)
    stream.close()  # type: ignore[attr-defined]


def test_generate_explains_its_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny(tmp_path, "gpt_oss")
    argv = ["generate", str(tmp_path), "-p", "x" * 30, "--raw", "-n", "12", "--ignore-eos", "--dtype", "fp32"]
    argv += ["--temperature", "0", "--mask", "window(20)"]
    assert main(argv) == 0
    plain = capsys.readouterr().out
    assert main([*argv, "--explain"]) == 0
    out, err = capsys.readouterr()
    assert out == plain
    lines = err.splitlines()[-5:]
    assert lines[0].startswith("the last step, at 41 tokens, read ")
    assert "(2 of 4 experts a token)" in lines[0]
    # Beside a window of 16 one of 20 adds nothing, and under no window it spares the rest.
    assert lines[1].startswith("  2 layers under causal() & window(16) & window(20): 16 of 41 keys, ")
    assert lines[2].startswith("  2 layers under causal() & window(20): 20 of 41 keys, ")
    assert lines[3].startswith("  floor ")
    assert " GB/s, as measured now" in lines[3]
    assert lines[4].startswith("  taken ")
    assert main([*argv, "--explain", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["explanation"]
    assert (told["context"], told["experts"], [x["keys"] for x in told["kv"]]) == (41, [2, 4], [16, 20])
    assert told["fraction_of_floor"] == pytest.approx(told["floor_seconds"] / told["step_seconds"])


def test_an_answer_of_one_token_has_no_decode_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny(tmp_path)
    argv = ["generate", str(tmp_path), "-p", "x", "--raw", "-n", "1", "--ignore-eos", "--explain"]
    assert main(argv) == 0
    assert capsys.readouterr().err.splitlines()[-1].startswith("no decode step to explain")
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["explanation"] is None
