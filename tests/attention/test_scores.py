"""Score modifications against their formulas, and against torch's FlexAttention, whose functions they are."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from flexdecode.attention.masks import causal
from flexdecode.attention.scores import (
    Score,
    ScoreMod,
    alibi,
    as_score,
    evaluate,
    relative_bias,
    score,
    soft_temperature,
    softcap,
    steps,
    temperature,
)
from flexdecode.kernels.ops import ScoreStep

ZERO = torch.tensor(0)
HEADS, LENGTH = 3, 9
RANDOM = torch.Generator().manual_seed(0)
SLOPES = torch.rand(HEADS, generator=RANDOM)
TABLE = torch.randn(HEADS, 5, generator=RANDOM)
BIAS = torch.randn(LENGTH, LENGTH, generator=RANDOM)
KEEP = torch.tensor([1, 7])

BUILT_IN: list[tuple[Score, Callable[[float, int, int, int], float]]] = [
    (softcap(1.5), lambda s, h, q, k: 1.5 * math.tanh(s / 1.5)),
    (temperature(0.7), lambda s, h, q, k: s / 0.7),
    (soft_temperature(3, 0.5), lambda s, h, q, k: s * (1 + 0.5 * math.log(1 + (q + 1) // 3))),
    (alibi(SLOPES), lambda s, h, q, k: s - float(SLOPES[h]) * (q - k)),
    (alibi(heads=HEADS), lambda s, h, q, k: s - (2**-4, 2**-8, 2**-2)[h] * (q - k)),
    (relative_bias(TABLE), lambda s, h, q, k: s + float(TABLE[h, min(max(q - k, 0), 4)])),
    (relative_bias(TABLE, -2), lambda s, h, q, k: s + float(TABLE[h, min(max(q - k + 2, 0), 4)])),
    (
        softcap(2.0).then(alibi(SLOPES)).then(temperature(2)),
        lambda s, h, q, k: (2 * math.tanh(s / 2) - float(SLOPES[h]) * (q - k)) / 2,
    ),
]


def raw(heads: int = HEADS, queries: int = LENGTH, keys: int = LENGTH) -> Tensor:
    return torch.randn(heads, queries, keys, generator=torch.Generator().manual_seed(1)) * 4


def run(mod: ScoreMod, queries: list[int] | None = None, keys: list[int] | None = None) -> Tensor:
    q = torch.arange(LENGTH) if queries is None else torch.tensor(queries, dtype=torch.int64)
    k = torch.arange(LENGTH) if keys is None else torch.tensor(keys, dtype=torch.int64)
    return evaluate(mod, raw()[:, q][:, :, k], ZERO, torch.arange(HEADS), q, k)


def torch_makes(mod: ScoreMod) -> Tensor:
    """The modified scores that FlexAttention itself computes with: their exponentials are what the rows of the identity
    as values are weighed by."""
    eye = torch.eye(LENGTH).expand(1, HEADS, LENGTH, LENGTH)
    q = raw()[None]
    out, lse = flex_attention(q, eye, eye, score_mod=mod, scale=1.0, return_lse=True)  # q @ eye is q
    return torch.log(out[0]) + lse[0][..., None]


@pytest.mark.parametrize(("mod", "formula"), BUILT_IN, ids=lambda x: str(x) if isinstance(x, Score) else "")
def test_every_built_in_is_its_formula(mod: Score, formula: Callable[[float, int, int, int], float]) -> None:
    wanted = torch.tensor(
        [
            [[formula(float(raw()[h, q, k]), h, q, k) for k in range(LENGTH)] for q in range(LENGTH)]
            for h in range(HEADS)
        ]
    )
    torch.testing.assert_close(run(mod), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(run(mod, [8, 3], [0, 7]), wanted[:, [8, 3]][:, :, [0, 7]], atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")  # torch warns of what is uncompiled and of return_lse
@pytest.mark.parametrize("mod", [mod for mod, _ in BUILT_IN], ids=str)
def test_torch_takes_ours_as_score_mods(mod: Score) -> None:
    torch.testing.assert_close(torch_makes(mod), run(mod), atol=1e-4, rtol=1e-4)


def by_step(step: ScoreStep, s: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """What docs of ScoreStep say."""
    if step.kind == "softcap":
        return step.a * torch.tanh(s / step.a)
    if step.kind == "scale":
        return s * step.a
    if step.kind == "log_scale":
        return s * (1 + step.a * torch.log(1 + torch.floor((q + 1) / step.b)))
    assert step.table is not None
    assert step.table.dtype == torch.float32
    assert step.table.is_contiguous()
    if step.kind == "alibi":
        return s - step.table[h] * (q - k)
    return s + step.table[h, torch.clamp(q - k - int(step.a), 0, step.table.shape[1] - 1)]


@pytest.mark.parametrize("mod", [mod for mod, _ in BUILT_IN], ids=str)
def test_steps_say_the_same(mod: Score) -> None:
    h, q, k = torch.arange(HEADS)[:, None, None], torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    found = steps(mod)
    assert found is not None
    wanted = raw()
    for step in found:
        wanted = by_step(step, wanted, h, q, k)
    torch.testing.assert_close(run(mod), wanted)


def test_steps_of_a_chain_follow_one_another() -> None:
    chain = temperature(2).then(softcap(3).then(soft_temperature(8192, 0.1)))
    found = steps(chain)
    assert found is not None
    assert [(step.kind, step.a, step.b) for step in found] == [
        ("scale", 0.5, 0.0),
        ("softcap", 3, 0.0),
        ("log_scale", 0.1, 8192),
    ]
    assert steps(chain.then(lambda s, b, h, q, k: s)) is None
    assert steps(lambda s, b, h, q, k: s) is None


@given(st.floats(0.1, 200.0), st.lists(st.floats(-1e6, 1e6), min_size=1))
@settings(deadline=None)
def test_softcap_is_its_formula(cap: float, scores: list[float]) -> None:
    got = softcap(cap)(torch.tensor(scores), ZERO, ZERO, ZERO, ZERO)
    wanted = torch.tensor([cap * math.tanh(s / cap) for s in scores], dtype=torch.float64)
    assert (got.double() - wanted).abs().max() <= 1e-6 * cap
    assert got.abs().max() <= cap * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_softcap_at_the_ends(dtype: torch.dtype) -> None:
    """B63: tanh by exponentials overflowed. What is infinite is capped, what is no number stays none."""
    ends = torch.tensor([0.0, 6e4, -6e4, math.inf, -math.inf, math.nan], dtype=dtype)
    got = softcap(50.0)(ends, ZERO, ZERO, ZERO, ZERO)
    assert got[:5].tolist() == [0.0, 50.0, -50.0, 50.0, -50.0]
    assert bool(got[5].isnan())


@pytest.mark.parametrize("heads", [1, 2, 8, 16, 3, 5, 6, 12, 20, 40])
def test_the_slopes_of_the_paper(heads: int) -> None:
    """Press et al., 2022: 8 heads have 1/2, 1/4 … 1/256; between powers of two, every second of the next is added."""

    def of_power(n: int) -> list[float]:
        first = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [first * first**i for i in range(n)]

    power = 2 ** int(math.log2(heads))
    wanted = of_power(power) + of_power(2 * power)[0::2][: heads - power]
    torch.testing.assert_close(alibi(heads=heads).slopes.tensor, torch.tensor(wanted))


def test_slopes_of_eight_heads_by_hand() -> None:
    assert alibi(heads=8).slopes.tensor.tolist() == [2.0**-i for i in range(1, 9)]
    between = torch.tensor([2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])
    torch.testing.assert_close(alibi(heads=12).slopes.tensor[8:], between)


def in_steps(size: int, s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s - (q_idx - kv_idx) // size


ZOO: dict[str, Callable[..., Any]] = {
    "nothing": lambda s, b, h, q, k: s,
    "distance": lambda s, b, h, q, k: s - 0.1 * (q - k),
    "table of pairs": lambda s, b, h, q, k: s + BIAS[q, k],
    "table of heads": lambda s, b, h, q, k: s * SLOPES[h] + TABLE[h, (q - k) % 5],
    "masking": lambda s, b, h, q, k: torch.where(k <= q, s, -float("inf")),
    "reduction": lambda s, b, h, q, k: torch.where((k == KEEP).any(), s + 1, s),
    "reduction of the score": lambda s, b, h, q, k: (s * TABLE[h]).sum(),
    "no score": lambda s, b, h, q, k: TABLE[h, 0],
    "a constant": lambda s, b, h, q, k: torch.zeros_like(s),
    "double": lambda s, b, h, q, k: s.double() * 0.5,
    "partial": functools.partial(in_steps, 3),
    "ours inside": lambda s, b, h, q, k: softcap(3.0)(s, b, h, q, k) + 1,
    "batch": lambda s, b, h, q, k: s + BIAS[b, k],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in ZOO if name != "double"])
def test_a_function_is_what_torch_makes_of_it(name: str) -> None:
    mod = ZOO[name]
    torch.testing.assert_close(run(mod), torch_makes(mod), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ZOO)
def test_a_part_is_a_part_of_the_whole(name: str) -> None:
    """Also in fp32 whatever the function returns, and of nothing nothing."""
    whole = run(ZOO[name])
    assert whole.dtype == torch.float32
    assert whole.shape == (HEADS, LENGTH, LENGTH)
    torch.testing.assert_close(run(ZOO[name], [8, 3, 4], [0, 7]), whole[:, [8, 3, 4]][:, :, [0, 7]])
    assert run(ZOO[name], [8], []).shape == (HEADS, 1, 0)
    one = score(ZOO[name])(torch.tensor(2.0), ZERO, ZERO, torch.tensor(5), torch.tensor(3))
    assert one.shape == ()


def test_functions_and_built_ins_in_one_chain() -> None:
    fn = ZOO["reduction"]
    torch.testing.assert_close(run(softcap(2.0).then(fn).then(temperature(2))), ((run(softcap(2.0)) + 0) / 2) + shift())
    torch.testing.assert_close(run(score(fn).then(softcap(2.0))), torch.tanh((raw() + 2 * shift()) / 2) * 2)


def shift() -> Tensor:
    """Half of what the reduction adds."""
    return torch.isin(torch.arange(LENGTH), KEEP).float().expand(HEADS, LENGTH, LENGTH) / 2


def test_scores_are_values() -> None:
    """Tables compare by content, functions by identity, chains by what is in them."""
    fn, other = ZOO["nothing"], ZOO["distance"]

    def made() -> list[Score]:
        single = [softcap(30.0), softcap(50.0), temperature(2), soft_temperature(2, 1), soft_temperature(1, 2)]
        tables = [alibi(SLOPES.clone()), alibi(SLOPES + 1), relative_bias(TABLE.clone()), relative_bias(TABLE, 1)]
        chains = [softcap(3).then(temperature(2)), temperature(2).then(softcap(3)), softcap(3).then(fn)]
        return [*single, *tables, *chains, alibi(heads=4), score(fn), score(other)]

    for i, mod in enumerate(made()):
        assert [mod == one for one in made()] == [i == j for j in range(len(made()))]
        assert hash(mod) == hash(made()[i])
    assert softcap(1).then(softcap(2).then(softcap(3))) == softcap(1).then(softcap(2)).then(softcap(3))
    assert as_score(softcap(1)) == softcap(1)


def test_a_table_is_a_copy() -> None:
    slopes = torch.ones(2)
    mod = alibi(slopes)
    slopes[0] = 5
    assert mod == alibi([1.0, 1.0])
    assert alibi(torch.ones(2, dtype=torch.bfloat16)) == mod


@pytest.mark.parametrize(
    ("mod", "text"),
    [
        (softcap(50.0).then(alibi([0.5, 0.25])), "softcap(50.0).then(alibi([0.5, 0.25]))"),
        (temperature(2).then(soft_temperature(8192, 0.1)), "temperature(2).then(soft_temperature(8192, 0.1))"),
        (relative_bias(TABLE, -2), "relative_bias(table of 3 heads and 5 distances, first=-2)"),
        (score(functools.partial(in_steps, 3)), "score(in_steps)"),
    ],
)
def test_a_score_prints_as_what_makes_it(mod: Score, text: str) -> None:
    assert str(mod) == repr(mod) == text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *[(lambda c=c: softcap(c), rf"softcap\({c}\).*greater than 0") for c in (0.0, -1.0, math.nan, math.inf)],
        (lambda: softcap("5"), "greater than 0"),
        (lambda: temperature(0), r"temperature\(0\).*greater than 0"),
        (lambda: soft_temperature(0, 1), r"soft_temperature\(0, 1\): the floor must be .*greater than 0"),
        (lambda: soft_temperature(1, math.nan), "the scale must be finite"),
        (alibi, "either the slopes or the number"),
        (lambda: alibi([1.0], 1), "either the slopes or the number"),
        (lambda: alibi(heads=0), r"alibi\(heads=0\).*at least 1"),
        (lambda: alibi([]), r"shape \(0,\)"),
        (lambda: alibi([[1.0]]), r"shape \(1, 1\) given, wanted are slopes \[heads\]"),
        (lambda: alibi("abc"), "'abc' given"),
        (lambda: alibi([1.0, math.nan]), "finite"),
        (lambda: relative_bias(torch.ones(3)), r"shape \(3,\).*a table \[heads, distances\]"),
        (lambda: relative_bias(TABLE, 0.5), "first is 0.5, wanted is a whole number"),
        (lambda: relative_bias(TABLE, 2**30), "first is 1073741824"),
        (lambda: as_score(3), "3 is no score modification"),
        (lambda: softcap(1).then(3), "3 is no score modification"),
        (lambda: score(causal()), r"takes \(b, h, q_idx, kv_idx\), and is called with \(score, b, h, q_idx, kv_idx\)"),
        (lambda: score(softcap), r"score function softcap takes \(cap\)"),
        (lambda: run(alibi([1.0, 2.0])), r"alibi\(\) has 2 slopes, and query head 2 was asked"),
        (lambda: run(relative_bias(TABLE[:1])), r"table of 1 heads, and query head 1 was asked"),
        (lambda: softcap(1).then(alibi([1.0])).check_heads(4), "1 slopes, and there are 4 query heads"),
        (lambda: relative_bias(TABLE).check_heads(2), "3 rows, and there are 2 query heads"),
        (lambda: run(lambda s, b, h, q, k: s if k <= q else -s), "score function lambda.*truth value.*torch.where"),
        (lambda: run(lambda s, b, h, q, k: 0.5), "returns 0.5, not a floating tensor"),
        (lambda: run(lambda s, b, h, q, k: k <= q), "returns torch.bool, not a floating tensor"),
        (lambda: run(lambda s, b, h, q, k: q - k), "returns torch.int64, not a floating tensor"),
        (lambda: run(lambda s, b, h, q, k: s + TABLE[h]), r"returns shape \(5,\)"),
        (lambda: run(lambda s, b, h, q, k: s + TABLE[h, k]), "size 5, and its index 5 is out of range"),
        (lambda: run(lambda s, b, h, q, k: s + s.item()), "a Python number"),
        (lambda: run(softcap(1).then(lambda s, b, h, q, k: s.nothing)), "fails: AttributeError"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_number_of_heads_that_fits() -> None:
    softcap(1).then(alibi(SLOPES)).then(relative_bias(TABLE)).then(ZOO["nothing"]).check_heads(HEADS)
