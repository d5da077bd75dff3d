"""flex_attention: torch's function of that name, for inference on a CPU, by the kernels of this package.

Shapes, mods and BlockMasks are torch's (2.13), and a call that torch accepts gives the result that its eager path
defines, with a BlockMask's lists honoured as its compiled kernels do. Knows no cache: keys and values are the caller's.
Shape letters: B batch, H query heads, C kv_heads, Q queries, L keys, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, FlexKernelOptions

from flexdecode.attention import batched
from flexdecode.attention.foreign import Everything, blocks_of
from flexdecode.attention.masks import Ints, Mask, MaskMod, as_mask
from flexdecode.attention.plan import AttentionPlan
from flexdecode.attention.recall import Recall
from flexdecode.attention.scores import Score, ScoreMod

_PLANS: Recall[AttentionPlan] = Recall()
_EVERYTHING = Everything()


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | MaskMod | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: FlexKernelOptions | dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Attention under any score_mod and mask (FlexAttention, https://arxiv.org/abs/2412.05496), inference on a CPU.

    query [B, H, Q, D], key [B or 1, C, L, D], value [B or 1, C, L, Dv], each fp32, bf16 or fp16, on the CPU, of any
    strides; keys and values are not copied where the last stride is 1. H must be C, or with `enable_gqa` a multiple of
    it. `scale` defaults to D ** -0.5. Returns out [B, H, Q, Dv] in query's dtype; with `return_lse` also lse, the
    natural log of the sum of exponentials, fp32 [B, H, Q]; with `return_aux` an AuxOutput that has it. A row that sees
    nothing gives 0 and -inf.

    `block_mask` is a BlockMask made for these lengths, its batch and heads 1 or query's. Beyond torch, it may be a
    plain mask_mod, and as there query i then stands at position i; or one of `flexdecode.masks`, and as everywhere in
    flexdecode query i then stands at position L - Q + i, for `score_mod` too. What is planned for a mask is kept for
    the next layers that bring it, as long as nothing that it depends on has changed (`recall.py`).

    `kernel_options` that tune torch's GPU kernels are taken and have no effect. Raises ValueError for whatever does not
    fit together, and for what this function cannot do: gradients, other devices and dtypes, maxima of scores.
    """
    _check(query, key, value, enable_gqa)
    _check_options(kernel_options, return_lse, return_aux)
    batch, heads, queries, head_dim = query.shape
    kv_heads, length, v_head_dim = value.shape[1:]
    shared = key.shape[0] != batch
    if isinstance(block_mask, BlockMask):
        _check_block_mask(block_mask, batch, heads, queries, length)
    elif shared and block_mask is None:
        raise ValueError(f"query has batch {batch}, key {key.shape[0]}; one of key is spread only under a block_mask")
    if shared:
        key, value = key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
    if isinstance(score_mod, Score):
        score_mod.check_heads(heads)
    kv, step = batched.in_slots(key, value)
    wants_lse = return_lse or (return_aux is not None and return_aux.lse)
    if batch * queries:
        mask = _EVERYTHING if block_mask is None else block_mask
        shape = (batch, heads, kv_heads, queries, length, step)
        plan = _PLANS.get(mask, shape, lambda: _plan(mask, *shape))
        scale = head_dim**-0.5 if scale is None else scale
        with torch.no_grad():
            out, lse = batched.run(query, kv, plan, scale, score=score_mod, return_lse=wants_lse)
    else:
        out, lse = query.new_empty(batch, queries, heads, v_head_dim), torch.empty(batch, queries, heads)
    out = out.transpose(1, 2)
    if not wants_lse:
        return out if return_aux is None else (out, AuxOutput())
    assert lse is not None
    lse = lse.transpose(1, 2).contiguous()
    return (out, lse) if return_aux is None else (out, AuxOutput(lse=lse))


def _plan(
    mask: BlockMask | Mask | MaskMod, batch: int, heads: int, kv_heads: int, queries: int, length: int, step: int
) -> AttentionPlan:
    q_idx: Ints = np.arange(queries)
    masks: Mask | Sequence[Mask]
    if isinstance(mask, BlockMask):
        masks = blocks_of(mask) if mask.kv_num_blocks.shape[0] == batch else blocks_of(mask) * batch
    elif isinstance(mask, Everything):
        masks = mask
    elif isinstance(mask, Mask):
        mask.check_heads(heads)
        q_idx, masks = q_idx + length - queries, [mask] * batch
    else:
        masks = [as_mask(mask)] * batch
    return batched.plan_batch(masks, batch, q_idx, length, heads, kv_heads, step)


def _check(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if x.is_nested or x.dim() != 4:
            shape = "a nested tensor" if x.is_nested else f"{x.dim()} dimensions"
            raise ValueError(f"{name} has {shape}; flex_attention takes [batch, heads, tokens, head_dim]")
        if x.device.type != "cpu":
            raise ValueError(
                f"{name} is on {x.device}; flexdecode.flex_attention runs on the CPU (use torch's own there)"
            )
        if x.dtype not in batched.DTYPES:
            known = ", ".join(map(str, batched.DTYPES))
            raise ValueError(f"{name} is {x.dtype}; flexdecode.flex_attention takes {known} (convert it)")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad; flexdecode.flex_attention is for inference (use torch.no_grad())")
    if key.dtype != value.dtype:
        raise ValueError(f"key is {key.dtype}, value {value.dtype}; they must be the same")
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(f"key is {list(key.shape[:3])} (batch, heads, tokens), value {list(value.shape[:3])}")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query has head_dim {query.shape[3]}, key {key.shape[3]}")
    if key.shape[0] not in (1, query.shape[0]):
        raise ValueError(f"query has batch {query.shape[0]}, key {key.shape[0]}")
    heads, kv_heads = query.shape[1], key.shape[1]
    if not enable_gqa and heads != kv_heads:
        raise ValueError(f"query has {heads} heads, key {kv_heads}; set enable_gqa=True for heads in groups")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"query has {heads} heads, which is no multiple of key's {kv_heads}")


def _check_options(
    kernel_options: FlexKernelOptions | dict[str, Any] | None, return_lse: bool, return_aux: AuxRequest | None
) -> None:
    options = dict(kernel_options or {})
    unknown = sorted(set(options) - set(FlexKernelOptions.__annotations__))
    if unknown:
        raise ValueError(f"kernel_options {', '.join(unknown)} are not known to torch's FlexKernelOptions")
    if (backend := options.get("BACKEND", "AUTO")) != "AUTO":
        raise ValueError(f"kernel_options BACKEND={backend} asks for a GPU kernel of torch's; leave it out on the CPU")
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux were both given; use return_aux=AuxRequest(lse=True) alone")
    if return_aux is not None and return_aux.max_scores:
        raise ValueError("return_aux asks for max_scores, which flexdecode.flex_attention does not return; ask for lse")


def _check_block_mask(block_mask: BlockMask, batch: int, heads: int, queries: int, length: int) -> None:
    if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise ValueError(
            "block_mask was sliced, and torch takes the mask_mod from a slice: set block_mask.mask_mod and seq_lengths"
        )
    if block_mask.kv_indices.dim() != 4:
        raise ValueError(f"block_mask has {block_mask.kv_indices.dim()} dimensions; it takes 4: batch, heads, Q, KV")
    if block_mask.kv_indices.device.type != "cpu":
        raise ValueError(f"block_mask is on {block_mask.kv_indices.device}, query on cpu; use block_mask.to('cpu')")
    if tuple(block_mask.seq_lengths) != (queries, length):
        made = block_mask.seq_lengths
        raise ValueError(
            f"block_mask was made for {made[0]} queries and {made[1]} keys, got {queries} and {length}: make one anew"
        )
    for name, made_for, got in zip(("batch", "heads"), block_mask.kv_num_blocks.shape[:2], (batch, heads), strict=True):
        if made_for not in (1, got):
            raise ValueError(f"block_mask was made for {name} {made_for}, query has {got}; it must be that or 1")
