"""Attention by torch's compiled FlexAttention, over the plan's blocks and the cache's pages as they lie.

Keys and values are one physical sequence of pages. The block mask names pages, and its mask_mod looks the plan's exact
bits up, so that a user's mask is never traced. A score_mod is traced, with rows and slots turned back into positions.
The query heads of a kv head are laid as rows: K is read once for all of them, at any ratio.

Values in a page that is read must be finite: FlexAttention multiplies what is masked by 0. Slots past a sequence's end
are made so here; a token whose value is not finite reaches every query that reads its page. The code is the same for
CPU and CUDA; it has been run on CPUs only. Shape letters: B tiles of a call, Q their queries, G query heads of a kv
head, R rows G·Q; C, H, T, D, S as everywhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions, flex_attention

from flexdecode.attention.backends.flex_tables import Batch, Tables, lay_out, row_block
from flexdecode.attention.request import VARIES, Call, Request
from flexdecode.attention.scores import Chain, ScoreMod, ScoreOf, as_score
from flexdecode.attention.visible import BLOCK
from flexdecode.kernels import build

_log = logging.getLogger(__name__)

_SHIFT, _REST = BLOCK.bit_length() - 1, BLOCK - 1
_WIDE = 128  # head_dim from which Triton's tiles must be smaller
_NO_LIMIT = 1 << 30
_SHOWN = 300  # characters of an error of torch's


class Flex:
    """Any mask, any score modification that torch can trace, any GQA ratio; on CUDA sinks and lse, too.

    What a compiled function knows of shapes depends on the pool and on buckets, never on the length of a context:
    once compiled, it serves until the pool is another. `compiler` is torch.compile; the identity gives FlexAttention's
    own slow definition.
    """

    name = "flex"

    def __init__(self, compiler: Callable[..., Callable[..., Any]] = torch.compile) -> None:
        self._compiler = compiler
        self._compiled: dict[Hashable, Callable[..., Any]] = {}

    def unsupported(self, request: Request) -> str | None:
        if request.batch_invariant:
            return VARIES
        if request.kv_dtype == torch.int8:
            return "torch's FlexAttention knows no scales, and an int8 cache has them"
        if request.dtype != request.kv_dtype:
            return f"torch's FlexAttention wants one dtype: q is {request.dtype}, the cache {request.kv_dtype}"
        if request.device == "cpu":
            return _unsupported_on_cpu(request)
        if request.head_dim < 16:
            return f"torch's FlexAttention wants a head_dim of 16 or more on {request.device}, got {request.head_dim}"
        return None

    def run(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Raises ValueError where a page is not a block of FlexAttention, a tile has no pages, or torch cannot compile
        the score modification."""
        if call.kv.page != BLOCK:
            raise ValueError(f"backend flex reads pages of {BLOCK} tokens, and the cache has {call.kv.page}: set page=")
        if any(tile.pages_P is None for tile in call.plan.tiles):
            raise ValueError("backend flex reads keys in pages, and these lie in one run: use cpu, sdpa or reference")
        q_THD, (kv_heads, slots, _) = call.q_THD, call.kv.k_CSD.shape
        group = q_THD.shape[1] // kv_heads
        place = f"{self.name}: {kv_heads} kv heads of {group}, {slots} slots"
        batches = call.plan.memo.get(place)
        if not isinstance(batches, tuple):
            batches = call.plan.memo[place] = lay_out(call.plan, group, kv_heads, slots // BLOCK, q_THD.device)
        out = q_THD.new_empty(*q_THD.shape[:2], call.kv.v_CSD.shape[2])
        lse = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
        with torch.no_grad():
            for batch in batches:
                _make_finite(call.kv.v_CSD, batch.tails)
                self._serve(call, batch, group, out, lse)
        return out, lse if call.return_lse else None

    def _serve(self, call: Call, batch: Batch, group: int, out_THD: Tensor, lse_TH: Tensor) -> None:
        kv_heads, _, head_dim = call.kv.k_CSD.shape
        q_BQCGD = call.q_THD.index_select(0, batch.source).view(-1, batch.queries, kv_heads, group, head_dim)
        q_BCRD = q_BQCGD.permute(0, 2, 3, 1, 4).reshape(-1, kv_heads, group * batch.queries, head_dim)
        arguments = (q_BCRD, call.kv.k_CSD[None], call.kv.v_CSD[None], batch.tables)
        want_lse = call.return_lse or call.sinks_H is not None
        out_BCRD, lse_BCR = self._compute(call, batch.queries, want_lse, arguments)
        out = _packed(out_BCRD, batch, group)
        if want_lse:
            lse = _packed(lse_BCR[..., None], batch, group)[..., 0]
            if call.sinks_H is not None:
                out, lse = with_sinks(out, lse, call.sinks_H)
            lse_TH.index_copy_(0, batch.rows_T, lse)
        out_THD.index_copy_(0, batch.rows_T, out)

    def _compute(self, call: Call, queries: int, want_lse: bool, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Call the function compiled for these shapes, and compile it first where it is new."""
        q, k, v, _ = arguments
        score, per_head = None if call.score is None else as_score(call.score), call.plan.mask.per_head
        # All that torch would compile anew for, so that none is a surprise.
        modes = (torch.get_num_threads(), torch.is_inference_mode_enabled(), q.dtype, str(q.device))
        shapes = (queries, q.shape, k.shape, k.stride(), v.shape, v.stride())
        key = (score, call.scale, want_lse, per_head, shapes, modes)
        compiled = self._compiled.get(key)
        told = "" if score is None else f" with {score}"
        try:
            if compiled is not None:
                found: tuple[Tensor, Tensor] = compiled(*arguments)
                return found
            _log.info("compiling FlexAttention%s for %d tiles of %d rows", told, q.shape[0], q.shape[2])
            start = time.perf_counter()
            written = attention(score, call.scale, queries, want_lse, per_head)
            compiled = self._compiler(written, dynamic=False, fullgraph=True)
            # The limit guards against functions that are compiled again and again, and counts ours as one.
            with torch._dynamo.config.patch(recompile_limit=_NO_LIMIT, accumulated_recompile_limit=_NO_LIMIT):
                found = compiled(*arguments)
            _log.info("compiled FlexAttention in %.1f s", time.perf_counter() - start)
        except RuntimeError as problem:
            if score is None or isinstance(problem, torch.OutOfMemoryError):
                raise
            reason = " ".join(str(problem).split())[:_SHOWN]
            raise ValueError(f"torch's FlexAttention fails{told}: {reason}; use cpu or reference") from problem
        self._compiled[key] = compiled
        return found


def attention(
    score: ScoreMod | None, scale: float, queries: int, want_lse: bool, per_head: bool
) -> Callable[[Tensor, Tensor, Tensor, Tables], tuple[Tensor, Tensor | None]]:
    """The function to compile: q [B, C, R, D], k and v [1, C, S, D], tables -> out [B, C, R, D], lse [B, C, R].

    Nothing that changes from step to step is a constant of it.
    """
    mods = _plain(score)

    def serve(q: Tensor, k: Tensor, v: Tensor, t: Tables) -> tuple[Tensor, Tensor | None]:
        group = q.shape[2] // queries

        def mask_mod(b: Tensor, c: Tensor, row: Tensor, slot: Tensor) -> Tensor:
            word = t.words_WR[t.at_BCP[b, c if per_head else 0, slot >> _SHIFT], row]
            return (word >> (slot & _REST)) & 1 == 1

        def score_mod(x: Tensor, b: Tensor, c: Tensor, row: Tensor, slot: Tensor) -> Tensor:
            # A page has slots past the sequence's end. They are masked, but a function that looks a position up in a
            # table of its own must not be led beyond it (pytorch#137801).
            kv_idx = torch.minimum((t.logical_BP[b, slot >> _SHIFT] << _SHIFT) + (slot & _REST), t.last_B[b])
            h, q_idx, modified = c * group + row // queries, t.q_idx_BR[b, row], x
            for mod in mods:
                modified = mod(modified, t.batch_B[b], h, q_idx, kv_idx).to(x.dtype)
            return modified

        block_mask = BlockMask.from_kv_blocks(
            t.partial_BCN,
            t.partial_BCNP,
            # Without these two the CPU's template does not compile, so they are there even where no page is full.
            t.full_BCN,
            t.full_BCNP,
            BLOCK_SIZE=(row_block(q.shape[2]), BLOCK),
            mask_mod=mask_mod,
            seq_lengths=(q.shape[2], k.shape[2]),
            compute_q_blocks=False,
        )
        # Triton's tile of keys must divide a page, and fit into shared memory where heads are wide. CPUs ignore it.
        options: FlexKernelOptions = {"BLOCK_N": BLOCK if max(q.shape[3], v.shape[3]) <= _WIDE else BLOCK // 2}
        mod = score_mod if mods else None
        if not want_lse:
            return flex_attention(q, k, v, mod, block_mask, scale, kernel_options=options), None
        aux = AuxRequest(lse=True)
        out, also = flex_attention(q, k, v, mod, block_mask, scale, kernel_options=options, return_aux=aux)
        return out, also.lse

    return serve


def with_sinks(out_THD: Tensor, lse_TH: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) once a sink has joined each head's denominator: out · e^lse / (e^lse + e^sink)."""
    sinks_H = sinks_H.float()
    kept_TH = torch.where(lse_TH == float("-inf"), 0.0, torch.sigmoid(lse_TH - sinks_H))
    return (out_THD.float() * kept_TH[..., None]).to(out_THD.dtype), torch.logaddexp(lse_TH, sinks_H)


def _plain(score: ScoreMod | None) -> tuple[ScoreMod, ...]:
    """What to trace: of a plain function itself, not the checks around it, which Python alone can run."""
    if score is None:
        return ()
    if isinstance(score, Chain):
        return tuple(mod for part in score.parts for mod in _plain(part))
    return (score.fn if isinstance(score, ScoreOf) else score,)


def _make_finite(v_CSD: Tensor, slots: Tensor) -> None:
    """Replace what is not finite in slots past a sequence's end: 0 · NaN would be NaN.

    A forked sequence may have tokens of its own there; finite values stay what they are.
    """
    if len(slots):
        v_CSD.index_copy_(1, slots, torch.nan_to_num(v_CSD.index_select(1, slots), 0.0, 0.0, 0.0))


def _packed(x_BCRX: Tensor, batch: Batch, group: int) -> Tensor:
    """A call's rows in the order of the packed q, [T, H, X]."""
    size, kv_heads, _, width = x_BCRX.shape
    x_BQCGX = x_BCRX.reshape(size, kv_heads, group, batch.queries, width).permute(0, 3, 1, 2, 4)
    return x_BQCGX.reshape(size * batch.queries, kv_heads * group, width).index_select(0, batch.take_T)


def _unsupported_on_cpu(request: Request) -> str | None:
    if request.sinks:
        return "torch's compiled FlexAttention returns no log-sum-exp on a CPU, and attention sinks need it"
    if request.return_lse:
        return "torch's compiled FlexAttention returns no log-sum-exp on a CPU"
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        return "torch's compiled FlexAttention needs a CPU with AVX2"
    if build.compiler() is None:
        return "torch's compiled FlexAttention needs a C++ compiler, and none was found (g++, c++, clang++)"
    return None
