"""Rope against transformers' own formulas for every type, and the rotation against complex numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from flexdecode.config import RopeConfig
from flexdecode.models.rope import Rope, attention_scaling, inverse_frequencies, regime, rotate

CPU = torch.device("cpu")
DEFAULT = RopeConfig(theta=5e5, rotary_dim=128)
LONGROPE = RopeConfig(
    theta=1e4,
    rotary_dim=8,
    type="longrope",
    factor=4.0,
    original_max_position=32,
    max_position=128,
    short_factor=(1.0, 1.1, 1.2, 1.3),
    long_factor=(2.0, 4.0, 6.0, 8.0),
)
DYNAMIC = RopeConfig(theta=1e4, rotary_dim=8, type="dynamic", factor=2.0, max_position=32)


def theirs(
    kind: str, head_dim: int, share: float, theta: float, max_position: int, length: int, **parameters: Any
) -> tuple[Tensor, float]:
    """transformers' inverse frequencies and attention factor."""
    given_ = {k: v for k, v in parameters.items() if v is not None}
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rope_parameters={"rope_type": kind, "rope_theta": theta, "partial_rotary_factor": share, **given_},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=length)
    return frequencies, float(factor)


def check(rope: RopeConfig, length: int, wanted: tuple[Tensor, float]) -> None:
    got = inverse_frequencies(rope, length)
    assert got.dtype == torch.float32
    assert got.shape == (rope.rotary_dim // 2,)
    torch.testing.assert_close(got, wanted[0], rtol=3e-6, atol=0)
    assert attention_scaling(rope) == pytest.approx(wanted[1], rel=1e-12)


HEAD_DIMS = st.sampled_from([32, 64, 80, 96, 128, 256])
SHARES = st.sampled_from([1.0, 0.75, 0.5, 0.25])
THETAS = st.one_of(st.sampled_from([1e3, 1e4, 5e5]), st.floats(1e3, 1e7))
FACTORS = st.floats(1.0, 64.0)
LENGTHS = st.integers(1, 200_000)
POSITIONS = st.sampled_from([64, 2048, 4096, 8192, 131_072])
many = settings(deadline=None, max_examples=60)


def common(data: st.DataObject) -> tuple[int, float, float, int, int, int]:
    head_dim, share = data.draw(HEAD_DIMS), data.draw(SHARES)
    return head_dim, share, data.draw(THETAS), data.draw(POSITIONS), data.draw(LENGTHS), int(head_dim * share)


def test_default() -> None:
    wanted = [5e5 ** -(2 * i / 128) for i in range(64)]
    torch.testing.assert_close(inverse_frequencies(DEFAULT, 10), torch.tensor(wanted), rtol=1e-6, atol=0)
    assert attention_scaling(DEFAULT) == 1.0


@given(data=st.data(), factor=FACTORS)
@many
def test_linear(data: st.DataObject, factor: float) -> None:
    head_dim, share, theta, top, length, dim = common(data)
    rope = RopeConfig(theta, dim, "linear", top, factor)
    check(rope, length, theirs("linear", head_dim, share, theta, top, length, factor=factor))


@given(data=st.data(), factor=FACTORS)
@many
def test_dynamic(data: st.DataObject, factor: float) -> None:
    head_dim, share, theta, top, length, dim = common(data)
    rope = RopeConfig(theta, dim, "dynamic", top, factor)
    check(rope, length, theirs("dynamic", head_dim, share, theta, top, length, factor=factor))


@given(
    data=st.data(),
    factor=FACTORS,
    attention_factor=st.none() | st.floats(0.5, 2.0),
    beta_fast=st.floats(2.0, 64.0),
    beta_slow=st.floats(0.1, 2.0),
    mscale=st.none() | st.floats(0.0, 2.0),
    mscale_all_dim=st.none() | st.floats(0.0, 2.0),
    truncate=st.booleans(),
    original=POSITIONS,
)
@many
def test_yarn(data: st.DataObject, factor: float, original: int, **options: Any) -> None:
    head_dim, share, theta, top, length, dim = common(data)
    rope = RopeConfig(theta, dim, "yarn", top, factor, original, **options)
    options |= {"factor": factor, "original_max_position_embeddings": original}
    check(rope, length, theirs("yarn", head_dim, share, theta, top, length, **options))


@given(data=st.data(), factor=FACTORS, attention_factor=st.none() | st.floats(0.5, 2.0), original=POSITIONS)
@many
def test_longrope(data: st.DataObject, factor: float, attention_factor: float | None, original: int) -> None:
    head_dim, share, theta, top, length, dim = common(data)
    factors = st.lists(st.floats(0.5, 64.0), min_size=dim // 2, max_size=dim // 2)
    short, long = data.draw(factors), data.draw(factors)
    rope = RopeConfig(
        theta,
        dim,
        "longrope",
        top,
        factor,
        original,
        attention_factor,
        short_factor=tuple(short),
        long_factor=tuple(long),
    )
    options = {"short_factor": short, "long_factor": long, "attention_factor": attention_factor, "factor": factor}
    options["original_max_position_embeddings"] = original
    for at in (length, original, original + 1):
        check(rope, at, theirs("longrope", head_dim, share, theta, top, at, **options))


@given(data=st.data(), factor=FACTORS, low=st.floats(0.5, 2.0), more=st.floats(0.1, 8.0), original=POSITIONS)
@many
def test_llama3(data: st.DataObject, factor: float, low: float, more: float, original: int) -> None:
    head_dim, share, theta, top, length, dim = common(data)
    rope = RopeConfig(theta, dim, "llama3", top, factor, original, low_freq_factor=low, high_freq_factor=low + more)
    options = {"low_freq_factor": low, "high_freq_factor": low + more, "original_max_position_embeddings": original}
    check(rope, length, theirs("llama3", head_dim, share, theta, top, length, factor=factor, **options))


@given(data=st.data(), factor=FACTORS, share=st.floats(0.0, 1.0))
@many
def test_proportional(data: st.DataObject, factor: float, share: float) -> None:
    head_dim, _, theta, top, length, _ = common(data)
    assume(int(share * head_dim // 2) > 0)
    rope = RopeConfig(theta, head_dim, "proportional", top, factor, proportion=share)
    check(rope, length, theirs("proportional", head_dim, share, theta, top, length, factor=factor))


# lengths


def test_regimes() -> None:
    """What a sequence's keys have in common: under longrope two sets of frequencies, under dynamic one a length."""
    assert [regime(DEFAULT, n) for n in (1, 10**6)] == [0, 0]
    assert [regime(LONGROPE, n) for n in (1, 32, 33, 1000)] == [0, 0, 1, 1]
    assert [regime(DYNAMIC, n) for n in (1, 31, 32)] == [0, 0, 0]
    assert len({regime(DYNAMIC, n) for n in (32, 33, 34, 100)}) == 4


@given(st.sampled_from([LONGROPE, DYNAMIC, DEFAULT]), st.integers(1, 200), st.integers(1, 200))
@settings(deadline=None)
def test_equal_regimes_have_equal_frequencies_and_others_not(rope: RopeConfig, a: int, b: int) -> None:
    same = torch.equal(inverse_frequencies(rope, a), inverse_frequencies(rope, b))
    assert same == (regime(rope, a) == regime(rope, b))


def expected(rope: RopeConfig, positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
    angles = positions.double()[:, None] * inverse_frequencies(rope, length).double()
    scaling = attention_scaling(rope)
    return (angles.cos() * scaling)[:, None], (angles.sin() * scaling)[:, None]


def assert_tables(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rope", [DEFAULT, LONGROPE, DYNAMIC], ids=lambda r: r.type)
def test_a_batch_of_different_lengths(rope: RopeConfig) -> None:
    """A short sequence beside one that has outgrown its regime: each turns by its own frequencies, whatever the
    packing, and more regimes than are remembered change nothing."""
    lengths = [5, 200, 32, 33, *range(40, 60), 7]
    counts = [1 + i % 4 for i in range(len(lengths))]
    positions = [torch.arange(n - c, n) for n, c in zip(lengths, counts, strict=True)]
    table = Rope(rope, CPU)
    for _ in range(2):
        cos, sin = table.tables(torch.cat(positions), lengths, counts)
        assert cos.shape == (sum(counts), 1, rope.rotary_dim // 2)
        row = 0
        for p, n, c in zip(positions, lengths, counts, strict=True):
            part = cos[row : row + c], sin[row : row + c]
            assert_tables(part, expected(rope, p, n))
            assert_tables(table.tables(p, [n], [c]), expected(rope, p, n))
            row += c


def test_a_run_is_no_more_than_its_ends() -> None:
    """Sequences of one token each whose first and last positions look like a run's; then a run, onward and back."""
    rope = Rope(DEFAULT, CPU)
    for steps in ([1, 1, 1, 1, 1, 6], [4, 5, 6], [7], [8, 9], [70], [69], [5, 4, 7], [3]):
        positions = torch.tensor(steps)
        got = rope.tables(positions, [100] * len(steps), [1] * len(steps))
        assert_tables(got, expected(DEFAULT, positions, 100))


@pytest.mark.parametrize("position", [0, 1, 255, 256, 257, 4095, 131_071, 1_000_000])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_long_positions_keep_their_angles(position: int, theta: float) -> None:
    """B62: positions or frequencies in bf16 are off by whole radians from 256 on. Frequencies are fp32, as those who
    trained the models had them; all after is fp64, whatever the model's dtype."""
    rope = replace(DEFAULT, theta=theta)
    cos, sin = Rope(rope, CPU).tables(torch.tensor([position]), [position + 1], [1])
    assert_tables((cos, sin), expected(rope, torch.tensor([position]), position + 1))
    if position <= 4095:
        angles = [position * theta ** -(2 * i / 128) for i in range(64)]
        assert max(abs(c - math.cos(a)) for c, a in zip(cos.flatten().tolist(), angles, strict=True)) < 5e-3
        assert max(abs(s - math.sin(a)) for s, a in zip(sin.flatten().tolist(), angles, strict=True)) < 5e-3


# rotation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (80, 32), (64, 16), (10, 8), (2, 2)])
def test_rotation_is_complex_multiplication(dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    """Dimension i and i + rotary_dim / 2 are one complex number, turned by position times frequency."""
    rope, positions = RopeConfig(1e4, rotary_dim), torch.tensor([0, 3, 500])
    wide = torch.randn(3, 7, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    x = wide[:, 2:6]  # a slice of the packed q, k and v, as the decoder has it
    got = rotate(x, *Rope(rope, CPU).tables(positions, [501], [3]))
    assert got.dtype == dtype
    half = rotary_dim // 2
    z = torch.complex(x[..., :half].double(), x[..., half:rotary_dim].double())
    angles = positions.double()[:, None] * inverse_frequencies(rope, 1).double()
    turned = z * torch.polar(torch.ones_like(angles), angles)[:, None]
    wanted = torch.cat([turned.real, turned.imag], dim=-1)
    size = torch.cat([z.abs(), z.abs()], dim=-1)
    roundoff = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    assert bool(((got[..., :rotary_dim].double() - wanted).abs() <= 1.01 * roundoff * size).all())
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])


@given(m=st.integers(0, 4000), n=st.integers(0, 4000), shift=st.integers(0, 100_000))
@settings(deadline=None, max_examples=50)
def test_a_score_depends_on_the_distance_only(m: int, n: int, shift: int) -> None:
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 128, generator=g) for _ in range(2))
    table = Rope(DEFAULT, CPU)

    def score(a: int, b: int) -> float:
        turned = [rotate(x, *table.tables(torch.tensor([p]), [p + 1], [1])) for x, p in ((q, a), (k, b))]
        return float((turned[0].double() * turned[1].double()).sum())

    assert score(m, n) == pytest.approx(score(m + shift, n + shift), abs=1e-4)


def test_the_input_is_left_as_it_was() -> None:
    x = torch.randn(2, 3, 16)
    before = x.clone()
    rotate(x, *Rope(RopeConfig(1e4, 8), CPU).tables(torch.tensor([5, 6]), [7], [2]))
    assert torch.equal(x, before)
