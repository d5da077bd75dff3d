"""Public fault reports about programmable attention, each as a test of ours: what went wrong elsewhere must not here.

One test a report (or a few of one kind), named in its docstring; every backend that needs no compiling is asked, each
against the formula in fp64. What a report says of compiling is in backends/test_flex.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from flexdecode import attend, flex_attention, masks, plan_attention, scores
from flexdecode.attention.cache import CacheLayer, KVCache
from flexdecode.attention.masks import Mask, causal, document, per_head, prefix_lm, sinks, window
from flexdecode.attention.plan import plan_tiles
from flexdecode.attention.request import Backend
from flexdecode.attention.scores import alibi
from flexdecode.attention.visible import BLOCK
from tests.attention.dense import BACKENDS, Counting, Filled, check, filled, queries, run

every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
USER_MASKS: dict[str, Mask] = {
    "prefix": prefix_lm(30),
    "window and sinks": causal() & (window(8) | sinks(4)),
    "documents": causal() & document([0] * 70 + [1] * 90 + [2] * 40),
    "by head": per_head([causal(), causal() & window(5), causal() & (window(9) | sinks(2)), causal()]),
    "plain": causal() & masks.mask(lambda b, h, q, k: (q - k < 7) | (k % 5 == 0)),
}


def last(f: Filled, mask: Mask, counts: list[int], backend: Backend) -> Tensor:
    """Attention of the last `counts[i]` tokens of each sequence."""
    return run(f, queries(counts, 4, 16), counts, mask, backend)


@every_backend
@pytest.mark.parametrize("mask", USER_MASKS.values(), ids=USER_MASKS)
def test_a_decode_step_is_the_prefills_row(mask: Mask, backend: Backend) -> None:
    """attention-gym#46, attention-gym#60, pytorch#163314 (B54): at one query a mask that counted from 0 saw the first
    key only, and a sliced one everything."""
    f = filled([200], mask)
    whole = last(f, mask, [200], backend)
    plan_of = [torch.tensor([position]) for position in (0, 3, 63, 64, 150, 199)]
    for positions in plan_of:
        plan = plan_attention(f.cache, f.sequences, [1], mask, [positions], heads=4)
        at = int(positions)
        q = queries([200], 4, 16)[at : at + 1]
        row = attend(q, f.cache, 0, plan, backend=backend)
        torch.testing.assert_close(row, whole[at : at + 1], atol=1e-5, rtol=1e-5)


@every_backend
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 130, 255, 257])
def test_what_lies_behind_the_last_key_is_not_attended(length: int, backend: Backend) -> None:
    """gpt-fast#233, pytorch#159247, pytorch#160861 (B53): the zeros of a static cache, or the rest of its last block,
    took part."""
    f = filled([length], causal(), page=64, rest=1e4)
    check(last(f, causal(), [1], backend), f, queries([1], 4, 16), [1], causal())


def test_nobody_slices_a_mask() -> None:
    """pytorch#143260: a sliced BlockMask kept its old shape. It is refused in words; a mask of ours needs no slice."""
    block_mask = create_block_mask(lambda b, h, q, k: k <= q, 1, 1, 256, 256, device="cpu")
    q, k = torch.randn(1, 2, 128, 16), torch.randn(1, 2, 256, 16)
    with pytest.raises(ValueError, match=r"slice|256|128"):
        flex_attention(q, k, k, block_mask=block_mask[:, :, :1])
    assert flex_attention(q[:, :, :1], k, k, block_mask=causal()).shape == (1, 2, 1, 16)


@every_backend
def test_one_mask_object_for_every_length(backend: Backend) -> None:
    """pytorch#137779, attention-gym#31, pytorch#141625 (B58): a mask built for one length failed on the next, or was
    quietly wrong."""
    mask = USER_MASKS["window and sinks"]
    for lengths in ([256], [130], [40, 199], [257]):
        f = filled(lengths, mask)
        counts = [1] * len(lengths)
        check(last(f, mask, counts, backend), f, queries(counts, 4, 16), counts, mask)


@every_backend
@pytest.mark.parametrize("shape", [(), (1,), (3,), (3, 1)], ids=str)
def test_offsets_of_every_shape(shape: tuple[int, ...], backend: Backend) -> None:
    """transformers#46682, transformers#46802, attention-gym#97: an offset of one element made a mask of five
    dimensions, one a sequence could not be read under vmap."""
    offsets = torch.arange(math.prod(shape)).view(shape) + 2
    index = {0: lambda b: offsets, 1: lambda b: offsets[b % len(offsets)], 2: lambda b: offsets[b, 0]}[len(shape)]
    mask = causal() & masks.mask(lambda b, h, q, k: k >= index(b))
    f = filled([50, 30, 70], mask)
    check(last(f, mask, [1, 2, 20], backend), f, queries([1, 2, 20], 4, 16), [1, 2, 20], mask)


@every_backend
def test_masks_are_asked_for_sequences_not_for_slots(backend: Backend) -> None:
    """attention-gym#189: after frees, a paged mask used the batch slot of somebody else."""
    mask = causal() & masks.mask(lambda b, h, q, k: k % (b + 2) != 1)
    f = filled([90, 33, 64], mask, scattered=3)
    check(last(f, mask, [1, 1, 1], backend), f, queries([1, 1, 1], 4, 16), [1, 1, 1], mask)


@every_backend
def test_where_pages_lie_changes_no_bit(backend: Backend) -> None:
    """pytorch#182593: results depended on where pages lay."""
    mask = USER_MASKS["window and sinks"]
    tidy, torn = (filled([300], mask, scattered=scattered) for scattered in (0, 5))
    assert torch.equal(last(tidy, mask, [3], backend), last(torn, mask, [3], backend))


def test_addresses_and_tables_beyond_32_bits() -> None:
    """vllm#50427, pytorch#185264, NeMo Automodel PR 3802: 32-bit offsets wrapped, into keys or a captured table."""
    (tile,) = plan_tiles(causal(), np.array([99]), 100, heads=1, kv_heads=1, base=2**33)
    assert tile.slots(tile.keys_L(), 64)[-1] == 2**33 + 99
    product = causal() & masks.mask(lambda b, h, q, k: q * k >= 0)
    (tile,) = plan_tiles(product, np.array([2**17]), 2**17, heads=1, kv_heads=1)
    assert len(tile.keys_L()) == 2**17  # q · k is 2^34 at its largest


def test_a_plan_costs_what_is_held_not_what_the_pool_could() -> None:
    """vllm PR 55977: memory of groups times pages of the pool."""
    cache = KVCache([CacheLayer(1, 4, causal())], 2**22, dtype=torch.bfloat16)
    sequence = cache.new()
    cache.append([sequence], [100])
    plan = plan_attention(cache, [sequence], [100], causal())
    arrays = [x for t in plan.tiles for x in (t.seen.blocks_N, t.seen.bits_at_N, t.seen.bits_MR, t.pages_P)]
    assert sum(x.nbytes for x in arrays if x is not None) < 4096


@every_backend
def test_two_masks_in_turn(backend: Backend) -> None:
    """vllm PR 45232, vllm#24358, vllm#25864 (B59): layers whose custom masks alternate, beside a model's window."""
    both = [USER_MASKS["plain"] & window(16), USER_MASKS["documents"]]
    cache = KVCache([CacheLayer(2, 16, both[i % 2]) for i in range(4)], 512, page=16, dtype=torch.float32)
    sequence = cache.new()
    k, v = (torch.randn(190, 2, 16, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    slots = cache.append([sequence], [190])
    q = queries([40], 4, 16)
    for layer in range(4):
        cache.write(layer, slots, k, v)
        plan = plan_attention(cache, [sequence], [40], both[layer % 2], heads=4)
        out = attend(q, cache, layer, plan, backend=backend)
        assert isinstance(out, Tensor)
        check(out, Filled(cache, [sequence], [k], [v]), q, [40], both[layer % 2])


@every_backend
@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 12])
@pytest.mark.parametrize("mask", ["plain", "window and sinks"])
def test_groups_of_any_size(group: int, mask: str, backend: Backend) -> None:
    """pytorch#143117, pytorch#151359: query heads that are no power of two a kv head."""
    f = filled([150], USER_MASKS[mask])
    q = queries([2], 2 * group, 16)
    check(run(f, q, [2], USER_MASKS[mask], backend), f, q, [2], USER_MASKS[mask])


@every_backend
@pytest.mark.parametrize("count", [1, 17, 64])
def test_masks_by_head_under_grouped_heads(count: int, backend: Backend) -> None:
    """pytorch#148527: a mask that differs by head left the path of decoding."""
    f = filled([150], USER_MASKS["by head"])
    check(last(f, USER_MASKS["by head"], [count], backend), f, queries([count], 4, 16), [count], USER_MASKS["by head"])


@every_backend
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 100, 127, 128, 129, 130])
def test_any_number_of_queries(count: int, backend: Backend) -> None:
    """pytorch PR 185349: a hundred queries of a group of two found no kernel."""
    f = filled([140], causal())
    check(last(f, causal(), [count], backend), f, queries([count], 4, 16), [count], causal())


@every_backend
@pytest.mark.parametrize("dim", [31, 72, 80, 96, 192, 256])
def test_any_head_dim(dim: int, backend: Backend) -> None:
    """pytorch#133321, attention-gym#127, pytorch#133254, pytorch#180278: sizes of a head that were refused, wrong, or
    out of shared memory."""
    f = filled([100], causal(), head_dim=dim, v_head_dim=dim // 2)
    for count in (1, 40):
        q = queries([count], 4, dim)
        check(run(f, q, [count], causal(), backend), f, q, [count], causal())


def test_planning_asks_only_what_is_undecided() -> None:
    """pytorch#134756, pytorch#151043, attention-gym#149, flashinfer#724: masks were evaluated densely, every step, for
    ten times what attention took."""
    mask = Counting(causal() & (window(1024) | sinks(4)))
    cache = KVCache([CacheLayer(1, 4, mask)], 40_000, dtype=torch.bfloat16)
    sequence = cache.new()
    for _ in range(8):
        cache.append([sequence], [4096])
        plan_attention(cache, [sequence], [1], mask)
    for _ in range(BLOCK + 1):
        cache.append([sequence], [1])
        mask.keys.clear()
        plan_attention(cache, [sequence], [1], mask)
        assert sum(mask.keys) <= 3 * BLOCK  # the first block, the window's edge, the last block


@every_backend
@pytest.mark.parametrize("count", [1, 30])
def test_sinks_join_the_denominator(count: int, backend: Backend) -> None:
    """transformers#40345, transformers#41026, transformers#41083, unsloth#3982 (B56): no log-sum-exp on a CPU, and
    sinks put into a score_mod."""
    mask = causal() & window(16)
    f = filled([60], mask, last=[count])
    q, logits = queries([count], 4, 16), torch.tensor([-3.0, 0.0, 2.0, 9.0])
    if backend.name == "sdpa":
        with pytest.raises(ValueError, match="no attention sinks"):
            run(f, q, [count], mask, backend, sinks=logits)
        return
    check(run(f, q, [count], mask, backend, sinks=logits), f, q, [count], mask, sinks_H=logits)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lse_is_a_natural_logarithm_in_fp32(dtype: torch.dtype, backend: Backend) -> None:
    """pytorch#181645, attention-gym#37: lse was off by ln 2, or zeros."""
    if backend.name == "sdpa":
        return  # has none, and says so (test_choose)
    f = filled([90], causal(), dtype=dtype)
    q = queries([5], 2, 16, dtype)
    plan = plan_attention(f.cache, f.sequences, [5], causal())
    _, lse = attend(q, f.cache, 0, plan, backend=backend, return_lse=True)
    scores = torch.einsum("qhd,lhd->qhl", q.double(), f.k[0].double()) / 4
    scores = scores.masked_fill(torch.arange(90) > torch.arange(85, 90)[:, None, None], -math.inf)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-4, rtol=1e-5)


@every_backend
def test_a_captured_table_need_be_no_longer_than_the_sequence(backend: Backend) -> None:
    """pytorch#137801, attention-gym#130: padding to whole blocks asked a table for what it does not have."""
    for length in (1, 65, 130):
        table = torch.arange(length) % 3
        mask = causal() & masks.mask(lambda b, h, q, k, t=table: t[q] == t[k])
        f = filled([length], mask)
        check(last(f, mask, [1], backend), f, queries([1], 4, 16), [1], mask)
        if backend.name != "sdpa":
            q, bias = queries([1], 4, 16), torch.randn(length)
            score = scores.score(lambda s, b, h, q, k, t=bias: s + t[k])
            out = run(f, q, [1], mask, backend, score=score)
            check(out, f, q, [1], mask, score=score, positions_Q=torch.tensor([length - 1]))


@every_backend
def test_values_that_nobody_sees_may_be_nan(backend: Backend) -> None:
    """flash-attention#2374, flash-attention#1745: 0 · NaN of unused values."""
    f = filled([70], causal(), page=64, rest=math.nan)
    check(last(f, causal(), [1], backend), f, queries([1], 4, 16), [1], causal())


@every_backend
def test_a_neighbour_is_never_read(backend: Backend) -> None:
    """pytorch#177378: jagged sequences ran into each other."""
    mask = causal()
    f = filled([70, 45, 90], mask)
    before = last(f, mask, [2, 1, 40], backend)
    kv = f.cache.kv(0)
    slots = torch.from_numpy(f.cache.groups[0].slots(f.sequences[1], np.arange(45)))
    kv.k_CSD[:, slots], kv.v_CSD[:, slots] = 77.0, -77.0
    after = last(f, mask, [2, 1, 40], backend)
    assert torch.equal(before[:2], after[:2])
    assert torch.equal(before[3:], after[3:])


@every_backend
@pytest.mark.parametrize("count", [1, 40])
def test_a_row_that_sees_nothing_harms_nobody(count: int, backend: Backend) -> None:
    """transformers#32390, pytorch#131552 (B57): NaN of one empty row spread to all."""
    mask = causal() & masks.mask(lambda b, h, q, k: (q != 59) & (q != 55))
    f = filled([60, 41], mask)
    out = last(f, mask, [count, count], backend)
    assert out.isfinite().all()
    assert bool((out[count - 1] == 0).all())
    check(out, f, queries([count, count], 4, 16), [count, count], mask)


def test_a_mask_for_other_sizes_is_refused() -> None:
    """pytorch#172225: a mask of another batch or number of heads read out of bounds."""
    q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 64, 16)
    for batch, heads in ((3, 1), (1, 3)):
        block_mask = create_block_mask(lambda b, h, q, k: k <= q, batch, heads, 8, 64, device="cpu")
        with pytest.raises(ValueError, match=str(max(batch, heads))):
            flex_attention(q, k, k, block_mask=block_mask)
    with pytest.raises(ValueError, match=r"3.*4|4.*3"):
        flex_attention(q, k, k, block_mask=per_head([causal()] * 3))


def test_a_lone_hole_inside_is_seen() -> None:
    """flashinfer PR 4695: a custom mask was looked at in boundary tiles only."""
    hole = causal() & masks.mask(lambda b, h, q, k: k != 200)
    (tile,) = plan_tiles(hole, np.array([1000]), 1001, heads=2, kv_heads=1)
    shown = tile.visible_RL()
    assert shown is not None
    assert tile.keys_L()[~shown[0].numpy()].tolist() == [200]


def test_splits_follow_the_sequence_not_the_company() -> None:
    """flash-attention#1000, flash-attention#1897: splits from the capacity or the batch changed the result."""
    cpu = next(backend for backend in BACKENDS if backend.name == "cpu")
    alone = filled([700], causal(), seed=1)
    many = filled([700, 30, 900, 64, 5, 300, 128, 650], causal(), seed=1)
    q = queries([1] * 8, 4, 16)
    one, eight = run(alone, q[:1], [1], causal(), cpu), run(many, q, [1] * 8, causal(), cpu)
    assert torch.equal(one[0], eight[0])


def test_alibi_far_from_zero_does_not_empty_a_short_sequence() -> None:
    """Compiled FlexAttention on a CPU, under a bias of -200: a short sequence beside a long one came out 0."""
    lengths = [600, 3]
    for backend in BACKENDS:
        if backend.name == "sdpa":
            continue
        f = filled(lengths, causal())
        q = queries([1, 1], 4, 16)

        def score(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return s - 200.0

        out = run(f, q, [1, 1], causal(), backend, score=score)
        check(out, f, q, [1, 1], causal(), slack=1e-4)


def test_torchs_own_answer() -> None:
    """The same mods through torch's function and ours."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 130, 32, generator=generator) for _ in range(3))
    slopes = alibi(heads=4)
    block_mask = create_block_mask(lambda b, h, q, k: (k <= q) & (q - k < 40 + h), None, 4, 130, 130, device="cpu")
    ours = flex_attention(q, k, v, slopes, block_mask)
    theirs = torch_flex_attention(q, k, v, slopes, block_mask)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
