"""Attention for transformers models on a CPU: `import flexdecode.transformers` registers "flexdecode" with them.

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flexdecode")
    model.set_attn_implementation("flexdecode")

Dynamic and static caches, padded batches, windows, chunks, softcap, sinks, beams and speculation run as they do with
the model's eager attention; no [queries, keys] mask is made, and of a static cache only what is visible is read. A row
that sees nothing, as of padding, gives 0. Inference only. Knows transformers' interfaces and no model.
Shape letters: B batch, H query heads, C kv_heads, Q queries, L keys, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from flexdecode.attention import batched
from flexdecode.attention.foreign import Everything, Held, Lookup, Shifted
from flexdecode.attention.functions import mask_values
from flexdecode.attention.masks import Mask, Queries, causal, chunked, window
from flexdecode.attention.plan import AttentionPlan
from flexdecode.attention.recall import Recall
from flexdecode.attention.scores import Score
from flexdecode.attention.scores import softcap as softcapped

NAME = "flexdecode"
MaskFunction = Callable[[Any, Any, Any, Any], Any]

# The code of transformers' mask functions, by which their closures are known again.
_AND = masking_utils.and_masks().__code__
_WINDOW = masking_utils.sliding_window_overlay(1).__code__
_CHUNK = masking_utils.chunked_overlay(1, torch.zeros(1)).__code__


class StepMask:
    """What the queries of one forward see, for all layers that have this mask; planned when the first one asks.

    Slot i of the keys holds position kv_offset + i, query i stands at q_offset + i; `function` is called with these, as
    transformers calls it. padding_BL, bool by position, says which keys are there; none are beyond it. Plans count
    positions from slot 0.
    """

    ndim = 4  # transformers passes on what is no 2-D mask

    def __init__(
        self,
        shape: tuple[int, int, int],
        q_offset: int,
        kv_offset: int,
        function: MaskFunction,
        padding_BL: Tensor | None = None,
        use_vmap: bool = False,
    ) -> None:
        self.shape = shape  # batch, queries, keys
        self.first = q_offset - kv_offset  # where the first query stands, from slot 0
        self._offset = kv_offset
        self._function, self._padding_BL, self._use_vmap = function, padding_BL, use_vmap
        self._plans: dict[tuple[int, int, int], AttentionPlan] = {}

    def plan(self, heads: int, kv_heads: int, step: int) -> AttentionPlan:
        """The plan for keys of `kv_heads` whose sequences lie `step` slots apart."""
        key = (heads, kv_heads, step)
        if key not in self._plans:
            batch, queries, _ = self.shape
            masks, length = self._masks()
            q_idx = np.arange(self.first, self.first + queries)
            self._plans[key] = batched.plan_batch(masks, batch, q_idx, length, heads, kv_heads, step)
        return self._plans[key]

    def _masks(self) -> tuple[Mask | list[Mask], int]:
        """(the mask of all sequences, or one for each; the keys that it may show)."""
        batch, queries, length = self.shape
        known = [known_mask(self._function, b, self._offset) for b in range(batch)]
        masks = [_Asked(self._function, self._offset, self._use_vmap) if mask is None else mask for mask in known]
        alike = all(mask is not None and mask == known[0] for mask in known)
        stop = self.first + queries
        rest = np.array([stop]), np.array([length])
        if stop < length and not any(mask.sees(Queries(self.first, stop), *rest).some[0] for mask in masks):
            length = stop  # what a static cache has not filled yet
        there_BL = self._there(length)
        if there_BL is None:
            return masks[0] if alike else masks, length
        return [m if there_L.all() else m & Held(there_L) for m, there_L in zip(masks, there_BL, strict=True)], length

    def _there(self, length: int) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Which keys are there, bool [B, length]; None where all are."""
        if self._padding_BL is None:
            return None
        there = self._padding_BL[:, self._offset : self._offset + length]
        if there.shape[1] < length:
            there = nn.functional.pad(there, (0, length - there.shape[1]))
        return None if bool(there.all()) else there.numpy()


def step_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | StepMask | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> StepMask:
    """What transformers calls to make the masks of a forward."""
    if isinstance(attention_mask, StepMask):  # `generate` makes them in advance for a static cache
        return attention_mask
    padding = None if attention_mask is None else attention_mask.bool()
    # A static cache's offset is a tensor that counts on while layers are run: its value is taken now.
    shape = (batch_size, q_length, kv_length)
    return StepMask(shape, int(q_offset), kv_offset, mask_function, padding, use_vmap)


def known_mask(function: MaskFunction, b: int, offset: int) -> Mask | None:
    """One of transformers' mask functions as a mask of ours, positions counted from `offset`; None for any other."""
    if function is masking_utils.causal_mask_function:
        return causal()
    if function is masking_utils.bidirectional_mask_function:
        return Everything()
    code = getattr(function, "__code__", None)
    if code not in (_AND, _WINDOW, _CHUNK):
        return None
    held = dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))  # type: ignore[union-attr]
    if code is _WINDOW:
        return window(held["sliding_window"])
    if code is _CHUNK:
        return Shifted(chunked(held["chunk_size"]), offset - int(held["left_padding"][b]))
    mask: Mask = Everything()
    for part in held["mask_functions"]:
        other = known_mask(part, b, offset)
        if other is None:
            return None
        mask = other if isinstance(mask, Everything) else mask & other
    return mask


@dataclass(frozen=True, repr=False)
class _Asked(Mask):
    """A mask function of which nothing is known: asked about every key."""

    function: MaskFunction
    offset: int
    use_vmap: bool

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        ask = mask_values if self.use_vmap else _broadcast
        return ask(self.function, b, torch.zeros_like(b), q_idx + self.offset, kv_idx + self.offset)


def _broadcast(function: MaskFunction, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    answer: Tensor = function(b, h, q_idx, kv_idx)
    return answer


@dataclass(frozen=True, repr=False, eq=False)
class _Bias(Score):
    """score + bias_BHQL, for queries from position `first` on; a batch or heads of 1 are everyone's."""

    bias_BHQL: Tensor
    first: int

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        batch, heads = self.bias_BHQL.shape[:2]
        b, h = b if batch > 1 else torch.zeros_like(b), h if heads > 1 else torch.zeros_like(h)
        return score + self.bias_BHQL[b, h, q_idx - self.first, kv_idx].to(score.dtype)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: StepMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: query [B, H, Q, D], key [B, C, L, D], value [B, C, L, Dv], of any strides;
    out [B, Q, H, Dv], and no weights.

    `attention_mask` is what `step_mask` made, or a tensor [B or 1, H or 1, Q, L or more], bool or added to the scores.
    Without one, several queries are causal from position 0 on (if the module is), a single one sees all. `softcap` is
    applied first, then biases; `s_aux` [H] are sinks. Raises ValueError for what it cannot do, and says what can.
    """
    _check(query, key, value, dropout, kwargs)
    batch, heads, queries, head_dim = query.shape
    kv_heads, length = key.shape[1:3]
    if key.shape[0] == 1 < batch:
        key, value = key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
    kv, step = batched.in_slots(key, value)
    first = 0
    score: Score | None = None if softcap is None else softcapped(softcap)
    biases = []
    if isinstance(attention_mask, StepMask):
        if attention_mask.shape != (batch, queries, length):
            raise ValueError(
                f"attention_mask was made for (batch, queries, keys) {attention_mask.shape}, "
                f"a layer has {(batch, queries, length)}"
            )
        plan, first = attention_mask.plan(heads, kv_heads, step), attention_mask.first
    elif isinstance(attention_mask, Tensor):
        shape = (batch, heads, kv_heads, queries, length, step)
        plan, biased = _TABLES.get(attention_mask, shape, lambda: _plan_table(attention_mask, *shape))
        biases += [attention_mask] if biased else []
    elif attention_mask is None:
        if sliding_window is not None and sliding_window < length:
            raise ValueError(f"sliding_window is {sliding_window}, there are {length} keys and no attention_mask")
        causally = queries > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        plan = _plan_bare(bool(causally), batch, heads, kv_heads, queries, length, step)
    else:
        raise ValueError(f"attention_mask is a {type(attention_mask).__name__}; {NAME} takes a tensor or its own masks")
    biases += [] if position_bias is None else [position_bias]
    for bias in biases:
        score = _Bias(bias, first) if score is None else score.then(_Bias(bias, first))
    scale = head_dim**-0.5 if scaling is None else scaling
    sinks_H = None if s_aux is None else s_aux.detach().float().reshape(-1)
    with torch.no_grad():
        out, _ = batched.run(query, kv, plan, scale, score=score, sinks_H=sinks_H)
    return out, None


def _check(query: Tensor, key: Tensor, value: Tensor, dropout: float, options: dict[str, Any]) -> None:
    if query.device.type != "cpu":
        raise ValueError(f"query is on {query.device}; {NAME} attention runs on the CPU (use sdpa or flex_attention)")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype not in batched.DTYPES:
            raise ValueError(f"{name} is {x.dtype}; {NAME} attention takes {', '.join(map(str, batched.DTYPES))}")
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise ValueError(
            f"{NAME} attention is for inference and has no gradient: use torch.no_grad(), or sdpa to train"
        )
    if dropout:
        raise ValueError(f"{NAME} attention has no dropout, got {dropout}: use model.eval()")
    if options.get("output_attentions"):
        raise ValueError(f"{NAME} attention makes no attention weights (output_attentions=True): use eager")
    if options.get("head_mask") is not None:
        raise ValueError(f"{NAME} attention has no head_mask: use eager")


_TABLES: Recall[tuple[AttentionPlan, bool]] = Recall()


def _plan_table(
    mask: Tensor, batch: int, heads: int, kv_heads: int, queries: int, length: int, step: int
) -> tuple[AttentionPlan, bool]:
    """(the plan of a 4-D mask, whether it also adds to scores that are seen)."""
    fits = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
    if not fits or mask.shape[2] != queries or mask.shape[3] < length:
        raise ValueError(f"attention_mask is {list(mask.shape)}, a layer has {[batch, heads, queries, length]}")
    mask = mask[..., :length]
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    biased = mask.dtype != torch.bool and bool((mask[seen] != 0).any())
    masks: list[Mask] = [Lookup(seen[b if len(seen) > 1 else 0]) for b in range(batch)]
    return batched.plan_batch(masks, batch, np.arange(queries), length, heads, kv_heads, step), biased


@lru_cache(maxsize=8)
def _plan_bare(
    causally: bool, batch: int, heads: int, kv_heads: int, queries: int, length: int, step: int
) -> AttentionPlan:
    mask = causal() if causally else Everything()
    return batched.plan_batch(mask, batch, np.arange(queries), length, heads, kv_heads, step)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, step_mask)
