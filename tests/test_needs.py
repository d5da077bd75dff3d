"""What a model needs is known from its headers, and the cache takes no more than it may."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexdecode import LLM, SamplingParams, llm
from flexdecode.attention.sizing import Sizing
from flexdecode.checkpoints.open import open_source
from flexdecode.checkpoints.safetensors import SafetensorsSource
from flexdecode.config import ModelConfig
from flexdecode.families import resolve
from flexdecode.families.rules import rules
from flexdecode.llm import describe_model
from flexdecode.needs import settle, sizing, weights_held
from tests.checkpoints import quantize_ckpt, tiny
from tests.oracles import ids

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
KIB, MIB = 1 << 10, 1 << 20


def sizes_of(d: Path, kv_dtype: torch.dtype = torch.float32) -> tuple[Sizing, ModelConfig]:
    config, _ = resolve(open_source(d))
    return sizing(config, kv_dtype), config


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral", "gpt_oss"])
def test_the_weights_are_about_what_will_be_held(family: str, dtype: str, tmp_path: Path) -> None:
    tiny(tmp_path, family)
    loaded = LLM(tmp_path, dtype=dtype).describe()["weights_bytes"]
    assert describe_model(tmp_path, dtype=dtype)["needs"]["weights_held_bytes"] == pytest.approx(loaded, rel=0.05)


@pytest.mark.parametrize("fmt", ["gemm", "gemv", "ct"])
def test_integers_stay_integers(fmt: str, tmp_path: Path) -> None:
    tiny(tmp_path / "float", num_hidden_layers=2)
    quantize_ckpt(tmp_path / "float", tmp_path / "int", tmp_path / "twin", fmt)
    loaded = LLM(tmp_path / "int").describe()["weights_bytes"]
    source = open_source(tmp_path / "int")
    config, names = resolve(source)
    about = weights_held(source, rules(config, names, frozenset(source.names())), torch.bfloat16)
    assert about == pytest.approx(loaded, rel=0.2)


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
def test_the_cache_takes_what_it_may_and_no_more(family: str, kv_dtype: str, tmp_path: Path) -> None:
    """Everything that was allocated counts, int8's scales too; many requests at once all end, as they would alone."""
    tiny(tmp_path, family, num_hidden_layers=6, max_position_embeddings=2048)
    alone = LLM(tmp_path, dtype="fp32", kv_dtype=kv_dtype)
    for kib in (1600, 4000):
        bounded = LLM(tmp_path, dtype="fp32", kv_dtype=kv_dtype, kv_memory=kib * KIB, max_context=512)
        cache = bounded.engine.cache
        held = [cache.kv(i) for i in range(len(cache.layers))]
        tensors = [t for kv in held for t in (kv.k_CSD, kv.v_CSD, kv.k_scale_CS, kv.v_scale_CS) if t is not None]
        assert sum(t.nbytes for t in tensors) == cache.nbytes <= kib * KIB
        assert bounded.describe()["kv_memory_bytes"] == cache.nbytes
        prompts = [ids(n, seed=n) for n in (480, 30, 200, 400, 65, 17, 128, 300)]
        together = bounded.generate_batch(prompts, GREEDY)
        assert [a.token_ids for a in together] == [alone.generate(p, GREEDY).token_ids for p in prompts]


def test_layers_under_a_window_keep_a_window(tmp_path: Path) -> None:
    """A hybrid's sequence takes the context in its full layers, and in the others a window and a step's tokens."""
    tiny(tmp_path, "gemma3_text", num_hidden_layers=6, max_position_embeddings=65536)
    sizes, _ = sizes_of(tmp_path)
    window, full = sorted(sizes.one(65536))
    assert (full, window) == (1024, -(-16 // 64) + 1 + 512 // 64)
    per_token = 2 * 2 * 32 * 4
    assert sizes.nbytes(sizes.one(65536)) == (full + 5 * window) * 64 * per_token
    model = LLM(tmp_path, dtype="fp32", kv_memory=80 * MIB)
    assert model.max_context == 65536, "with full layers only, 80 MiB would end at 13653 tokens"
    assert model.engine.cache.nbytes <= 80 * MIB


def test_int8_counts_its_scales(tmp_path: Path) -> None:
    tiny(tmp_path, num_hidden_layers=2)
    whole, half = (sizes_of(tmp_path, dtype)[0] for dtype in (torch.bfloat16, torch.int8))
    assert whole.nbytes(whole.one(64)) == 64 * 2 * 2 * 2 * 32 * 2
    assert half.nbytes(half.one(64)) == 64 * 2 * 2 * (2 * 32 + 8)


def test_a_mask_of_ones_own_counts(tmp_path: Path) -> None:
    tiny(tmp_path, num_hidden_layers=2, max_position_embeddings=8192)
    masked = LLM(tmp_path, dtype="fp32", mask="window(64) | sinks(4)", kv_memory=1 * MIB)
    assert masked.max_context == 8192
    assert LLM(tmp_path, dtype="fp32", kv_memory=1 * MIB).max_context == 1024


def test_room_that_is_left_goes_to_more_windows_and_more_tokens(tmp_path: Path) -> None:
    tiny(tmp_path, "gemma3_text", num_hidden_layers=6, max_position_embeddings=4096)
    sizes, config = sizes_of(tmp_path)
    full = config.layers.index(next(x for x in config.layers if x.attention.window is None))
    assert full, "the first group is the windows'"
    unit = sizes.nbytes(sizes.one(4096))
    window, whole = sizes.one(4096)
    for budget in (unit, unit * 3 // 2, 4 * unit, 6 * unit, 20 * unit, 1000 * unit):
        for greedy in (False, True):
            pages = sizes.cut(budget, 4096, 4, 64, greedy)
            assert sizes.nbytes(pages) <= budget
            assert pages[0] >= window
            assert pages[1] >= whole
    assert sizes.cut(1000 * unit, 4096, 4, 64, False) == (min(4 * whole, 64 * window), 4 * whole)
    assert sizes.cut(1000 * unit, 4096, 4, 64, True) == (64 * window, 64 * whole)


@pytest.mark.parametrize(
    ("weights", "free", "max_context", "kv_memory", "words"),
    [
        (
            30 * MIB,
            20 * MIB,
            None,
            None,
            r"m: about 30 MiB of weights and 64 KiB of cache.* 20 MiB .*--ignore-m",
        ),
        (1 * MIB, 2 * MIB, 2048, None, r"about 1 MiB .* 2 MiB of cache for 2048 tokens make 3 MiB, and 2 MiB"),
        (1 * MIB, 8 * MIB, 2048, MIB, r"max_context=2048 takes 2 MiB .*allows 1 MiB; ask for at most 1024 tokens"),
        (1 * MIB, 8 * MIB, None, "32KiB", r"kv_memory=32KiB is 32 KiB, and a page of 64 tokens takes 64 KiB"),
        (1 * MIB, 8 * MIB, 64, "8MiB", r"1 MiB of weights and kv_memory=8MiB make 9 MiB, and 8 MiB .*at most 7340032"),
        (1 * MIB, 8 * MIB, 64, 0, r"at least 1 byte, got 0"),
        (1 * MIB, 8 * MIB, 64, "lots", r"--kv-memory\) 'lots' is no amount of memory"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(
    weights: int, free: int, max_context: int | None, kv_memory: int | str | None, words: str, tmp_path: Path
) -> None:
    tiny(tmp_path, num_hidden_layers=2, max_position_embeddings=4096)
    sizes, _ = sizes_of(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        settle("m", sizes, weights, free, 4096, max_context, kv_memory, False)
    assert "\n" not in str(caught.value)


def test_what_is_free_bounds_the_context_that_nobody_asked_for(tmp_path: Path) -> None:
    tiny(tmp_path, num_hidden_layers=2, max_position_embeddings=4096)
    sizes, _ = sizes_of(tmp_path)

    def settled(**asked: object) -> tuple[int, int]:
        options = {"max_context": None, "kv_memory": None, "ignore_memory": False} | asked
        config = settle("m", sizes, MIB, 3 * MIB, 4096, **options)  # type: ignore[arg-type]
        return config.max_context, config.kv_tokens

    assert settled() == (1024, 1024)
    assert settled(kv_memory="100%") == (2048, 2048)
    assert settled(max_context=512) == (512, 1024)
    assert settled(max_context=128) == (128, 512), "room for four"
    assert settled(max_context=128, kv_memory="1MiB") == (128, 1024), "or for as much as was given"
    assert settled(max_context=4096, ignore_memory=True) == (4096, 4096)


def test_a_model_that_does_not_fit_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(tmp_path)
    read: list[str] = []
    original = SafetensorsSource.read

    def reading(self: SafetensorsSource, name: str) -> torch.Tensor:
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(SafetensorsSource, "read", reading)
    monkeypatch.setattr(llm, "available_bytes", lambda device: 100 * KIB)
    with pytest.raises(ValueError, match=r"about .* of weights .* 100 KiB of memory are free"):
        LLM(tmp_path)
    assert read == []
    needs = describe_model(tmp_path)["needs"]
    assert (needs["fits"], needs["free_bytes"]) == (False, 100 * KIB)
    assert LLM(tmp_path, ignore_memory=True).generate([1, 2, 3], GREEDY).token_ids
    assert read
