"""torch's FlexAttention on our plans and pages: its slow definition over everything, the compiled one where kernels
differ, and that nothing is compiled twice. Compiling takes seconds: cases share shapes, and masks share a function."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as torchs

from flexdecode.attention import scores
from flexdecode.attention.attend import attend
from flexdecode.attention.backends.flex import Flex, with_sinks
from flexdecode.attention.backends.reference import Reference
from flexdecode.attention.cache import CacheLayer, KVCache
from flexdecode.attention.masks import Mask, causal, chunked, mask, window
from flexdecode.attention.plan import plan_attention, plan_tiles
from flexdecode.attention.request import Backend, Call, Request
from flexdecode.attention.scores import ScoreMod, alibi, relative_bias, softcap
from flexdecode.kernels import build
from tests.attention.dense import ByBatch, ByHead, Filled, Holes, Stripes, check, fill_unused, filled, queries, run

REFERENCE = Reference()
MASKS: dict[str, Mask] = {
    "causal": causal(),
    "window70": causal() & window(70),
    "chunked16": causal() & chunked(16),
    "holes": Holes(3),
    "nothing": Holes(1),
    "stripes": Stripes(7, first=20),
    "by batch": ByBatch(),
}
# Their tables are wider: another function. A plain function may look at h, whether it does or not.
PER_HEAD: dict[str, Mask] = {
    "heads": ByHead((causal(), causal() & window(5), Holes(2))),
    "opaque": ByHead((causal(), Stripes(5)), opaque=True),
    "function": mask(lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & ((kv_idx + h) % 3 != 0)),
    "of no head": mask(lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & ((kv_idx + b) % 3 != 0)),
}


@pytest.fixture(scope="module")
def flex() -> Flex:
    return Flex()


@pytest.fixture
def definition(monkeypatch: pytest.MonkeyPatch) -> Flex:
    """FlexAttention as torch defines it, not compiled: has lse, and asks the mask_mod about every slot of the pool."""
    monkeypatch.setattr(torchs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    return Flex(compiler=lambda function, **_: function)


def both(
    flex: Backend, f: Filled, q: Tensor, q_lens: list[int], under: Mask, score_mod: ScoreMod | None = None, **more: Any
) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
    """(ours, the reference's) of a call that need not go through `attend`."""
    plan = plan_attention(f.cache, f.sequences, q_lens, under, heads=q.shape[1])
    call = Call(q, f.cache.kv(0), plan, 0.25, score_mod, **more)
    return flex.run(call), REFERENCE.run(call)


def same(results: tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]) -> None:
    (out, lse), (wanted, wanted_lse) = results
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    assert (lse is None) == (wanted_lse is None)
    if lse is not None:
        torch.testing.assert_close(lse, wanted_lse, atol=1e-5, rtol=1e-5)


def tilted(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A score_mod that looks at everything."""
    return score + 0.3 * h + 0.1 * (b + 1) * torch.cos(q_idx - 2.0 * kv_idx)


EVERY_MASK = pytest.mark.parametrize(
    "under", [*MASKS.values(), *PER_HEAD.values()], ids=[*MASKS, *(f"{name} by head" for name in PER_HEAD)]
)


@EVERY_MASK
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [4, 16, 1]])
def test_the_definition_with_lse(definition: Flex, under: Mask, q_lens: list[int]) -> None:
    """Also what is only to be had on CUDA: lse, in natural logs (pytorch#181645)."""
    f = filled([70, 129, 33], under, last=q_lens, rest=1e4, page=64, scattered=1)
    same(both(definition, f, queries(q_lens, 6, 16), q_lens, under, return_lse=True))


@pytest.mark.parametrize("q_lens", [[1, 1], [40, 130]])
@pytest.mark.parametrize("under", [MASKS["window70"], MASKS["holes"], PER_HEAD["opaque"]], ids=str)
def test_the_definition_with_scores_and_sinks(definition: Flex, under: Mask, q_lens: list[int]) -> None:
    """Sinks belong to the softmax, and come by its lse (transformers#41083)."""
    f = filled([40, 142], under, last=q_lens, rest=1e4, page=64, scattered=1)
    mod = alibi(heads=6).then(scores.score(tilted)).then(softcap(3.0))
    sinks_H = torch.tensor([-3.0, 0.0, 1.0, 2.0, 5.0, -math.inf])
    same(both(definition, f, queries(q_lens, 6, 16), q_lens, under, mod, sinks_H=sinks_H, return_lse=True))


def test_sinks_join_rows_that_see_nothing() -> None:
    lse = torch.tensor([[-math.inf, -math.inf, 0.0]])
    sinks = torch.tensor([2.0, -math.inf, -math.inf])
    out, joined = with_sinks(torch.tensor([[[0.0], [0.0], [3.0]]]), lse, sinks)
    assert out.flatten().tolist() == [0.0, 0.0, 3.0]
    assert joined.flatten().tolist() == [2.0, -math.inf, 0.0]


BASE = Request(6, 2, 64, torch.bfloat16, torch.bfloat16, "cpu")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sinks": True}, "no log-sum-exp on a CPU, and attention sinks"),
        ({"return_lse": True}, "no log-sum-exp on a CPU"),
        ({"kv_dtype": torch.int8}, "an int8 cache"),
        ({"dtype": torch.float32}, "torch.float32, the cache torch.bfloat16"),
        ({"device": "cuda", "head_dim": 8}, "head_dim of 16 or more on cuda, got 8"),
        ({"device": "cuda", "sinks": True, "return_lse": True}, None),
        ({"head_dim": 8, "heads": 14}, None),
    ],
)
def test_what_it_cannot_do_has_a_reason(flex: Flex, changes: dict[str, Any], said: str | None) -> None:
    """transformers#40345: sinks on a CPU, where the log-sum-exp is missing."""
    reason = flex.unsupported(Request(**{**vars(BASE), **changes}))
    assert (reason is None) if said is None else (reason is not None and said in reason)


def test_a_machine_that_cannot_compile(flex: Flex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: None)
    assert "C++ compiler" in str(flex.unsupported(BASE))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert "AVX2" in str(flex.unsupported(BASE))


def test_pages_are_blocks(flex: Flex) -> None:
    f = filled([70], causal(), last=[1], page=16)
    with pytest.raises(ValueError, match="pages of 64 tokens, and the cache has 16"):
        run(f, queries([1], 4, 16), [1], causal(), flex)
    f = filled([70], causal(), last=[1], page=64)
    plan = plan_attention(f.cache, f.sequences, [1], causal())
    plan = type(plan)(plan.mask, 0, tuple(plan_tiles(causal(), torch.tensor([69]).numpy(), 70, heads=2, kv_heads=2)), 1)
    with pytest.raises(ValueError, match="lie in one run"):
        flex.run(Call(queries([1], 4, 16), f.cache.kv(0), plan, 0.25))


# Compiled. One function serves these: 6 heads on 2 kv heads of 64, fp32, a pool of one size.
LENGTHS = [(64, 206), (65, 205), (63, 207), (142, 128), (1, 269)]


def one_shape(lengths: tuple[int, int], under: Mask, q_lens: list[int], **more: Any) -> tuple[Filled, Tensor]:
    """More of the pool than two sequences hold is NaN, and so is what follows them in their pages."""
    f = filled(lengths, under, last=q_lens, rest=math.nan, page=64, head_dim=64, **{"scattered": 1, **more})
    return f, queries(q_lens, 6, 64)


@pytest.mark.slow
def test_every_mask_is_served_by_one_function(flex: Flex) -> None:
    """Lengths around a page's end (B53), rows that see nothing (B57), masks composed with a model's (B59): none is
    traced, so none can fail to compile or be compiled anew."""
    before = counters["stats"]["unique_graphs"]
    for under in MASKS.values():
        for lengths in LENGTHS:
            f, q = one_shape(lengths, under, [1, 1])
            check(run(f, q, [1, 1], under, flex), f, q, [1, 1], under)
    assert counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.slow
@pytest.mark.parametrize("q_lens", [[16, 9], [130, 40]])
def test_several_queries(flex: Flex, q_lens: list[int]) -> None:
    """Chunks and drafts: positions are absolute (B54), and a mask is made for the lengths at hand (B58)."""
    before = counters["stats"]["unique_graphs"]
    for under in MASKS.values():
        f, q = one_shape((142, 128), under, q_lens)
        check(run(f, q, q_lens, under, flex), f, q, q_lens, under)
    assert counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.slow
@pytest.mark.parametrize("q_lens", [[1, 1], [130, 40]])
def test_masks_that_differ_by_head(flex: Flex, q_lens: list[int]) -> None:
    """pytorch#148527: under GQA they left the decode path."""
    before = counters["stats"]["unique_graphs"]
    for under in PER_HEAD.values():
        f, q = one_shape((142, 128), under, q_lens)
        check(run(f, q, q_lens, under, flex), f, q, q_lens, under)
    assert counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.slow
def test_where_pages_lie_and_who_is_beside_changes_no_bit(flex: Flex) -> None:
    """pytorch#182593."""
    f, q = one_shape((142, 128), causal(), [1, 1], scattered=0)
    wanted = run(f, q, [1, 1], causal(), flex)
    for scattered in (1, 2, 3):
        f, q = one_shape((142, 128), causal(), [1, 1], scattered=scattered)
        assert torch.equal(run(f, q, [1, 1], causal(), flex), wanted)
    for page in f.cache.groups[0].table(f.sequences[1]):
        for x in (f.cache.kv(0).k_CSD, f.cache.kv(0).v_CSD):
            x[:, page * 64 : page * 64 + 64] = math.nan
    q[1] *= 100
    after = run(f, q, [1, 1], causal(), flex)
    assert torch.equal(after[0], wanted[0])
    assert bool(after[1].isnan().all())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "shape", "dtype", "q_lens"),
    [
        (1, {"head_dim": 16}, torch.float32, [1, 1]),
        (7, {"head_dim": 80}, torch.bfloat16, [1, 1]),
        (4, {"head_dim": 31, "v_head_dim": 24}, torch.float16, [3, 4]),
        (4, {"head_dim": 64}, torch.bfloat16, [142, 40]),
    ],
    ids=str,
)
def test_heads_and_dtypes(flex: Flex, group: int, shape: dict[str, int], dtype: torch.dtype, q_lens: list[int]) -> None:
    """Ratios that are no power of two (pytorch#143117), head_dims that are none (pytorch#133321), v narrower than k."""
    for under in (causal(), Holes(3), causal() & window(70)):
        f = filled([142, 128], under, last=q_lens, rest=math.nan, page=64, dtype=dtype, scattered=1, **shape)
        q = queries(q_lens, 2 * group, shape["head_dim"], dtype)
        check(run(f, q, q_lens, under, flex), f, q, q_lens, under)


@pytest.mark.slow
def test_scores_are_traced_once(flex: Flex) -> None:
    """One that looks at all indices, and tables that are exactly as long as the sequence: slots past its end must not
    lead beyond (pytorch#137801). An equal one, made anew, is the same."""
    before = counters["stats"]["unique_graphs"]
    ahead = torch.linspace(-1, 1, 142)

    def looked_up(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return tilted(score, b, h, q_idx, kv_idx) + ahead[kv_idx] * ahead[q_idx]

    table = torch.randn(6, 100)
    for under in (causal(), Holes(3), causal() & window(70)):
        f, q = one_shape((142, 128), under, [3, 4])
        chain = alibi(heads=6).then(relative_bias(table.clone())).then(looked_up).then(softcap(3.0))
        same(both(flex, f, q, [3, 4], under, chain))
    assert counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.slow
def test_low_scores_are_not_lost(flex: Flex) -> None:
    """torch's split decode kernel takes a skipped partition's largest score for 0: beside it, a short sequence's
    scores of -200 vanished, and the result was 0. One head to a kv head and a large pool would choose that kernel."""
    f = filled([70, 900], causal(), last=[1, 1], page=64)
    q = queries([1, 1], 2, 16)
    (out, _), (wanted, _) = both(flex, f, q, [1, 1], causal(), lambda score, b, h, q_idx, kv_idx: score - 200.0)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    assert bool((wanted.abs().amax((1, 2)) > 0.01).all())


@pytest.mark.slow
def test_a_score_that_cannot_be_traced(flex: Flex) -> None:
    def branches(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * 2 if q_idx > 3 else score

    f, q = one_shape((142, 128), causal(), [1, 1])
    with pytest.raises(
        ValueError, match=r"^torch's FlexAttention fails with score\(branches\): .*; use cpu or reference$"
    ):
        run(f, q, [1, 1], causal(), flex, score=branches)


@pytest.mark.slow
def test_nothing_is_compiled_while_a_context_grows(flex: Flex, caplog: pytest.LogCaptureFixture) -> None:
    """pytorch#141486, #136196, B61: a shape is compiled when it first comes, and never again: over pages' ends, rows of
    two sequences, two layers, two masks, chunks of any length."""
    masks = (causal() & window(100), Stripes(2))
    layers = [CacheLayer(2, 16, masks[0]), CacheLayer(2, 16, masks[0]), CacheLayer(2, 16, masks[1])]
    cache = KVCache(layers, 1024, dtype=torch.float32)
    sequences = [cache.new(), cache.new()]

    def step(counts: list[int]) -> None:
        slots, q = cache.append(sequences, counts), queries(counts, 6, 16)
        for layer in range(3):
            cache.write(layer, slots, torch.randn(sum(counts), 2, 16), torch.randn(sum(counts), 2, 16))
        fill_unused(cache, math.nan)
        plans = [plan_attention(cache, sequences, counts, m, heads=6) for m in masks]
        for layer in range(3):
            plan = plans[cache.group_of[layer]]
            out = attend(q, cache, layer, plan, backend=flex)
            torch.testing.assert_close(out, attend(q, cache, layer, plan, backend=REFERENCE), atol=1e-5, rtol=1e-5)

    with caplog.at_level(logging.INFO, logger=Flex.__module__):
        step([60, 17])
        step([1, 1])
        assert [record.message.split()[0] for record in caplog.records] == ["compiling", "compiled"] * 2
        before = counters["stats"]["unique_graphs"]
        for _ in range(200):
            step([1, 1])
        step([100, 33])
        assert counters["stats"]["unique_graphs"] == before
        assert len(caplog.records) == 4


@pytest.mark.slow
def test_another_number_of_threads_is_another_function(flex: Flex) -> None:
    """A compiled function has room for as many threads as there were."""
    f, q = one_shape((142, 128), causal(), [1, 1])
    wanted, threads = run(f, q, [1, 1], causal(), flex), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert torch.equal(run(f, q, [1, 1], causal(), flex), wanted)
    finally:
        torch.set_num_threads(threads)
    with torch.inference_mode():
        assert torch.equal(run(f, q, [1, 1], causal(), flex), wanted)
