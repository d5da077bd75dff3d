"""flexdecode.flex_attention against torch's eager function, over the masks and scores that people write, and its
refusals. Numbers in docstrings are public reports about FlexAttention."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torchs
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, and_masks, create_block_mask, or_masks

from flexdecode.attention import batched, masks, scores
from flexdecode.attention.backends.reference import Reference
from flexdecode.attention.flex_attention import flex_attention as typed
from tests.grids import by_name, pairwise

flex_attention: Any = typed  # what it returns depends on what is asked for
EPSILON = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
LENGTHS = (63, 64, 65, 127, 129, 257)
HEADS = ((1, 1), (2, 2), (6, 2), (4, 1), (7, 1))


@pytest.fixture(params=["chosen", "reference"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(batched, "choose", lambda _: Reference())
    return str(request.param)


def theirs(*args: Any, **kwargs: Any) -> Any:
    """torch's eager function, in fp32."""
    before = torchs._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    torchs._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            eager: Any = torchs.flex_attention
            return eager(*(x.float() if isinstance(x, Tensor) else x for x in args), **kwargs)
    finally:
        torchs._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(
    heads: tuple[int, int] = (4, 2),
    queries: int = 5,
    length: int = 70,
    dims: tuple[int, int] = (16, 16),
    batch: int = 2,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        rand(batch, heads[0], queries, dims[0], dtype=dtype, seed=1),
        rand(batch, heads[1], length, dims[0], dtype=dtype, seed=2),
        rand(batch, heads[1], length, dims[1], dtype=dtype, seed=3),
    )


def check(ours: Any, wanted: Any, dtype: torch.dtype = torch.float32) -> None:
    """Outputs with their lse, both asked for by return_aux."""
    assert ours[0].dtype == dtype
    assert ours[1].lse.dtype == torch.float32
    torch.testing.assert_close(ours[0].float(), wanted[0], atol=8 * EPSILON[dtype], rtol=4 * EPSILON[dtype])
    torch.testing.assert_close(ours[1].lse, wanted[1].lse, atol=2e-5, rtol=2e-5)


# Masks and scores as people write them, for queries and keys counted from 0, made for (heads, queries, keys).


def _table(*shape: int, seed: int = 5) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def causal(heads: int, queries: int, keys: int) -> Callable[..., Tensor]:
    return lambda b, h, q_idx, kv_idx: q_idx >= kv_idx


def offset_causal(heads: int, queries: int, keys: int) -> Callable[..., Tensor]:
    offset = torch.tensor(keys - queries)
    return lambda b, h, q_idx, kv_idx: q_idx + offset >= kv_idx


def sliding(heads: int, queries: int, keys: int) -> Callable[..., Tensor]:
    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx + keys - queries - kv_idx < 20

    return and_masks(offset_causal(heads, queries, keys), near)


def prefix_lm(heads: int, queries: int, keys: int) -> Callable[..., Tensor]:
    lengths = torch.tensor([keys // 2, 3])
    return or_masks(causal(heads, queries, keys), lambda b, h, q_idx, kv_idx: kv_idx < lengths[b])


def document(heads: int, queries: int, keys: int) -> Callable[..., Tensor]:
    of_q, of_k = torch.arange(queries) // 7, torch.arange(keys) // 11
    return lambda b, h, q_idx, kv_idx: of_q[q_idx] == of_k[kv_idx]


def dense(heads: int, queries: int, keys: int) -> Callable[..., Tensor]:
    table = _table(2, heads, queries, keys) < 0.3
    return lambda b, h, q_idx, kv_idx: table[b, h, q_idx, kv_idx]


def some_heads(heads: int, queries: int, keys: int) -> Callable[..., Tensor]:
    return lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) | (h % 2 == 1)


def holes(heads: int, queries: int, keys: int) -> Callable[..., Tensor]:
    """Every second query sees nothing."""
    return lambda b, h, q_idx, kv_idx: (q_idx % 2 == 1) & (kv_idx >= 0)


MASKS = {f.__name__: f for f in (causal, offset_causal, sliding, prefix_lm, document, dense, some_heads, holes)}


def alibi(heads: int, queries: int, keys: int) -> Callable[..., Tensor]:
    slopes = _table(heads)
    return lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx)


def softcap(heads: int, queries: int, keys: int) -> Callable[..., Tensor]:
    return lambda score, b, h, q_idx, kv_idx: 2.0 * torch.tanh(score / 2.0)


def relative(heads: int, queries: int, keys: int) -> Callable[..., Tensor]:
    bias = _table(heads, queries + keys)
    return lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx - kv_idx + keys]


def dotted(heads: int, queries: int, keys: int) -> Callable[..., Tensor]:
    """A product of captured vectors: only right on scalar indices."""
    left, right = rand(2, queries, 8, seed=7), rand(2, keys, 8, seed=8)
    return lambda score, b, h, q_idx, kv_idx: score + torch.dot(left[b, q_idx], right[b, kv_idx])


def masking(heads: int, queries: int, keys: int) -> Callable[..., Tensor]:
    """A mask written as a score: rows may end up with nothing."""
    return lambda score, b, h, q_idx, kv_idx: torch.where((kv_idx + h) % 3 == 0, -math.inf, score)


SCORES = {f.__name__: f for f in (alibi, softcap, relative, dotted, masking)}
SHAPES = {
    "heads": HEADS,
    "queries": (1, 2, 16, 17, 130),
    "length": LENGTHS,
    "dims": ((16, 16), (31, 31), (72, 40), (80, 80), (48, 64)),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
}


@pytest.mark.parametrize(
    "case",
    pairwise(
        mask=tuple(MASKS), size=(64, 128, (1, 128), (128, 64), (100, 30)), how=("per head", "shared", "plain"), **SHAPES
    ),
    ids=by_name,
)
def test_masks(case: dict[str, Any], backend: str) -> None:
    """16, 18, 19, 24, 27: any GQA ratio, number of queries, head_dim and length, and the lse that goes with it."""
    (heads, _), queries, length, dtype = case["heads"], case["queries"], case["length"], case["dtype"]
    mask_mod = MASKS[case["mask"]](heads, queries, length)
    q, k, v = qkv(case["heads"], queries, length, case["dims"], dtype=dtype)
    full = create_block_mask(mask_mod, 2, heads, queries, length, "cpu", BLOCK_SIZE=case["size"])
    mask: Any = full
    if case["how"] == "plain":
        mask = mask_mod
    elif case["how"] == "shared" and case["mask"] not in ("dense", "some_heads", "prefix_lm"):
        mask = create_block_mask(mask_mod, None, None, queries, length, "cpu", BLOCK_SIZE=case["size"])
    options: dict[str, Any] = {"enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    check(flex_attention(q, k, v, None, mask, **options), theirs(q, k, v, block_mask=full, **options), dtype)


@pytest.mark.parametrize("case", pairwise(score=tuple(SCORES), mask=(None, "sliding", "dense"), **SHAPES), ids=by_name)
def test_scores(case: dict[str, Any], backend: str) -> None:
    (heads, _), queries, length, dtype = case["heads"], case["queries"], case["length"], case["dtype"]
    score_mod = SCORES[case["score"]](heads, queries, length)
    mask = None
    if case["mask"]:
        mask = create_block_mask(MASKS[case["mask"]](heads, queries, length), 2, heads, queries, length, "cpu")
    q, k, v = qkv(case["heads"], queries, length, case["dims"], dtype=dtype)
    options: dict[str, Any] = {"enable_gqa": True, "return_aux": AuxRequest(lse=True), "scale": 0.3}
    check(flex_attention(q, k, v, score_mod, mask, **options), theirs(q, k, v, score_mod, mask, **options), dtype)


def test_keys_of_one_sequence_for_all(backend: str) -> None:
    q, _, _ = qkv(batch=3)
    _, k, v = qkv(batch=1)
    mask = create_block_mask(dense(4, 5, 70), 2, 4, 5, 70, "cpu")
    bigger = create_block_mask(lambda b, h, q_idx, kv_idx: (kv_idx + b) % 3 == 0, 3, None, 5, 70, "cpu")
    options: dict[str, Any] = {"enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    check(flex_attention(q, k, v, None, bigger, **options), theirs(q, k, v, block_mask=bigger, **options))
    spread = flex_attention(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), enable_gqa=True)
    assert torch.equal(spread[1:2], flex_attention(q[1:2], k, v, enable_gqa=True))
    with pytest.raises(ValueError, match="query has batch 3, key 1"):
        flex_attention(q, k, v, enable_gqa=True)
    with pytest.raises(ValueError, match="made for batch 2, query has 3"):
        flex_attention(q, k, v, None, mask, enable_gqa=True)


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
def test_what_is_masked_never_shows(poison: float, backend: str) -> None:
    """26: 0 · NaN."""
    for queries in (1, 40):
        q, k, v = qkv(queries=queries)
        mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx < 50, None, None, queries, 70, "cpu")
        wanted = flex_attention(q, k, v, None, mask, enable_gqa=True)
        k[:, :, 50:], v[:, :, 50:] = poison, poison
        assert torch.equal(flex_attention(q, k, v, None, mask, enable_gqa=True), wanted)


def test_mods_are_asked_about_what_is_there_only(backend: str) -> None:
    """25: a table that is exactly as long as the sequence, though blocks reach beyond it."""
    q, k, v = qkv(queries=65, length=65)
    bias, ids = _table(65), torch.arange(65) // 9
    options: dict[str, Any] = {
        "score_mod": lambda score, b, h, q_idx, kv_idx: score + bias[kv_idx] - bias[q_idx],
        "block_mask": create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 65, 65, "cpu"),
        "enable_gqa": True,
        "return_aux": AuxRequest(lse=True),
    }
    check(flex_attention(q, k, v, **options), theirs(q, k, v, **options))


def test_a_block_masks_lists_are_honoured() -> None:
    """Full blocks are not asked, partial ones are, and what is listed nowhere is not seen, whatever mask_mod says."""
    q, k, v = qkv(queries=128, length=192, batch=1)
    mask = BlockMask.from_kv_blocks(
        torch.tensor([[[1, 2]]]),
        torch.tensor([[[[1, 9], [0, 2]]]]),  # beyond their number, lists may hold anything
        torch.tensor([[[1, 0]]]),
        torch.tensor([[[[2], [9]]]]),
        BLOCK_SIZE=64,
        mask_mod=causal(4, 128, 192),
        seq_lengths=(128, 192),
        compute_q_blocks=False,
    )
    i, j = torch.arange(128)[:, None], torch.arange(192)
    listed = torch.where(i < 64, (j >= 64) & (j < 128), (j < 64) | (j >= 128)) & (j <= i)
    seen = listed | ((i < 64) & (j >= 128))
    options: dict[str, Any] = {"enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    wanted = theirs(
        q, k, v, block_mask=create_block_mask(lambda b, h, q, k: seen[q, k], 1, 1, 128, 192, "cpu"), **options
    )
    check(flex_attention(q, k, v, None, mask, **options), wanted)


def test_one_row_of_a_block_mask() -> None:
    """3, 4: decoding with a slice, whose mask_mod and lengths the caller must set anew."""
    whole = create_block_mask(dense(4, 256, 256), 2, 4, 256, 256, "cpu")
    row = whole[:, :, 1]
    q, k, v = qkv(queries=1, length=256)
    with pytest.raises(ValueError, match=r"sliced.*set block_mask.mask_mod and seq_lengths"):
        flex_attention(q, k, v, None, row, enable_gqa=True)
    row.mask_mod = lambda b, h, q_idx, kv_idx: whole.mask_mod(b, h, q_idx + 200, kv_idx)
    with pytest.raises(ValueError, match="made for 256 queries and 256 keys, got 1 and 256"):
        flex_attention(q, k, v, None, row, enable_gqa=True)
    row.seq_lengths = (1, 256)
    options: dict[str, Any] = {"enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    check(flex_attention(q, k, v, None, row, **options), theirs(q, k, v, block_mask=row, **options))


def _later(mask: masks.Mask, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return mask(b, h, q_idx + 65, kv_idx)


def test_masks_of_our_own_stand_at_the_end(backend: str) -> None:
    """A Mask's queries are the last ones, for score_mod too; a plain function's are counted from 0."""
    q, k, v = qkv(queries=5, length=70)
    options: dict[str, Any] = {"enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    for mask in (
        masks.causal() & masks.window(9),
        masks.causal(),
        masks.mask(lambda b, h, q, k: (k <= q) & (k % 2 == h % 2)),
    ):
        there = create_block_mask(partial(_later, mask), 2, 4, 5, 70, "cpu")
        check(
            flex_attention(q, k, v, lambda s, b, h, q, k: s + 0.1 * (q - k), mask, **options),
            theirs(q, k, v, lambda s, b, h, q, k: s + 0.1 * (q + 65 - k), there, **options),
        )
    first = create_block_mask(causal(4, 5, 70), None, None, 5, 70, "cpu")
    assert torch.equal(
        flex_attention(q, k, v, None, causal(4, 5, 70), enable_gqa=True),
        flex_attention(q, k, v, None, first, enable_gqa=True),
    )
    assert not flex_attention(*qkv(queries=80), None, masks.causal(), enable_gqa=True)[:, :, :10].any()


def test_scores_of_our_own() -> None:
    q, k, v = qkv(queries=3)
    ours = flex_attention(q, k, v, scores.softcap(2.0), enable_gqa=True)
    torch.testing.assert_close(ours, theirs(q, k, v, softcap(4, 3, 70), enable_gqa=True), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="3 slopes, and there are 4 query heads"):
        flex_attention(q, k, v, scores.alibi([0.1, 0.2, 0.3]), enable_gqa=True)


def test_what_comes_back() -> None:
    """24: lse is the natural logarithm, -inf for a row that sees nothing; out is 0 there."""
    q, k, v = qkv(queries=2)
    mask = create_block_mask(holes(4, 2, 70), None, None, 2, 70, "cpu")
    out = flex_attention(q, k, v, None, mask, enable_gqa=True)
    assert isinstance(out, Tensor)
    assert out.shape == (2, 4, 2, 16)
    assert not out[:, :, 0].any()
    pair = flex_attention(q, k, v, None, mask, enable_gqa=True, return_lse=True)
    aux: Any = flex_attention(q, k, v, None, mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert aux[1]._fields == AuxOutput._fields
    assert torch.equal(pair[0], out)
    assert torch.equal(aux[0], out)
    assert torch.equal(pair[1], aux[1].lse)
    assert bool((aux[1].lse[:, :, 0] == -math.inf).all())
    products = torch.einsum("bcgd,bcld->bcgl", q[:, :, 1].view(2, 2, 2, 16), k) / 4
    torch.testing.assert_close(aux[1].lse[:, :, 1], products.logsumexp(-1).view(2, 4), atol=1e-5, rtol=1e-5)
    assert flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest())[1] == AuxOutput()


@pytest.mark.parametrize("lengths", [(0, 5), (3, 0)])
def test_nothing_to_attend(lengths: tuple[int, int]) -> None:
    q, k, v = qkv(queries=lengths[0], length=lengths[1], dims=(16, 8))
    out, lse = flex_attention(q, k, v, enable_gqa=True, return_lse=True)
    assert torch.equal(out, torch.zeros(2, 4, lengths[0], 8))
    assert torch.equal(lse, torch.full((2, 4, lengths[0]), -math.inf))


def test_no_gradient_is_lost() -> None:
    q, k, v = qkv(heads=(2, 2))
    with pytest.raises(ValueError, match=r"key requires grad.*no_grad"):
        flex_attention(q, k.requires_grad_(), v)
    with torch.no_grad():
        assert not flex_attention(q, k, v).requires_grad


Q, K, V = qkv(heads=(4, 4))
BLOCKS = create_block_mask(causal(4, 5, 70), None, None, 5, 70, "cpu")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"key": K[:, :2], "value": V[:, :2]}, r"query has 4 heads, key 2; set enable_gqa=True"),
        (
            {"key": K[:, :3], "value": V[:, :3], "enable_gqa": True},
            "query has 4 heads, which is no multiple of key's 3",
        ),
        ({"key": K[..., :8]}, "query has head_dim 16, key 8"),
        ({"value": V[:, :, :69]}, r"key is \[2, 4, 70\] .*value \[2, 4, 69\]"),
        ({"query": Q[0]}, "query has 3 dimensions"),
        ({"query": Q.double()}, r"query is torch.float64.*float32"),
        ({"value": V.bfloat16()}, "key is torch.float32, value torch.bfloat16"),
        ({"key": K.to("meta")}, "key is on meta; .*use torch's own"),
        ({"query": rand(3, 4, 5, 16), "block_mask": BLOCKS}, "query has batch 3, key 2"),
        ({"query": Q[:, :, :4], "block_mask": BLOCKS}, "made for 5 queries and 70 keys, got 4 and 70"),
        (
            {"key": K[:, :, :69], "value": V[:, :, :69], "block_mask": BLOCKS},
            "made for 5 queries and 70 keys, got 5 and 69",
        ),
        ({"block_mask": create_block_mask(causal(2, 5, 70), 2, 2, 5, 70, "cpu")}, "made for heads 2, query has 4"),
        ({"block_mask": create_block_mask(causal(2, 5, 70), 3, 1, 5, 70, "cpu")}, "made for batch 3, query has 2"),
        ({"block_mask": lambda b, h, q_idx, kv_idx: q_idx - kv_idx}, "int64, not a bool tensor"),
        ({"return_aux": AuxRequest(max_scores=True)}, "max_scores"),
        ({"return_aux": AuxRequest(lse=True), "return_lse": True}, "return_lse and return_aux"),
        ({"kernel_options": {"BLOCK_X": 1}}, "BLOCK_X"),
        ({"kernel_options": {"BACKEND": "FLASH"}}, "BACKEND=FLASH"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], told: str) -> None:
    """28, and masks made for another length that give plausible numbers."""
    with pytest.raises(ValueError, match=told):
        flex_attention(**({"query": Q, "key": K, "value": V} | change))


def test_options_that_only_tune_are_taken() -> None:
    plain = flex_attention(Q, K, V)
    assert torch.equal(flex_attention(Q, K, V, kernel_options={"BLOCK_M": 32, "BACKEND": "AUTO"}), plain)
