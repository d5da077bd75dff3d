"""Which matrices of a layer share an input, and what stands before it that can take the inverse of a scale.

Made from the layer's config alone, so that a new family needs no table of its own. Multiplying a column of every matrix
that reads an input by s, and dividing by s what makes that input, changes no output (Lin et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexdecode.config import LayerConfig, MlpConfig
from flexdecode.quantizer.modules import Module


@dataclass(frozen=True)
class Group:
    """`readers` are targets inside the layer (qkv, experts.3.down …) with one input, that of the first of them.

    What makes the input is the weight of a `norm`, or the last rows of a `linear` target: row r of them is channel r of
    the input, and where `repeat` is above 1 (grouped-query attention) it is the channels of `repeat` heads of
    `head_dim`. Both are "" where nothing can take a scale.
    """

    readers: tuple[str, ...]
    norm: str = ""
    linear: str = ""
    repeat: int = 1
    head_dim: int = 1

    @property
    def scalable(self) -> bool:
        return bool(self.norm or self.linear)


def groups(layer: LayerConfig) -> list[Group]:
    """The groups of a layer, in the order in which its inputs arise."""
    a, ff = layer.attention, layer.feed_forward
    before_attention = "attention_pre_norm" if layer.pre_norms else ""
    before_feed_forward = "feed_forward_pre_norm" if layer.pre_norms else ""
    # What attention puts out is a sum of values, so the rows of v can take a scale of the output's channels.
    found = [
        Group(("qkv",), norm=before_attention),
        Group(("out",), linear="qkv", repeat=a.heads // a.kv_heads, head_dim=a.head_dim),
    ]
    # Only where the gated product is linear in its second half; clamping it is not.
    linear = ff.activation != "clamped_swiglu"
    if isinstance(ff, MlpConfig):
        found.append(Group(("gate_up",), norm=before_feed_forward))
        found.append(Group(("down",), linear="gate_up" if linear else ""))
        return found
    gate_up = tuple(f"experts.{e}.gate_up" for e in range(ff.experts))
    found.append(Group(("router", *gate_up), norm=before_feed_forward))
    found += [Group((f"experts.{e}.down",), linear=f"experts.{e}.gate_up" if linear else "") for e in range(ff.experts)]
    return found


def movable(group: Group, modules: Sequence[Module], at: str) -> bool:
    """Whether a scale may be moved: something is quantized, and nothing that would change is stored with others.

    `modules` are those of the layer, whose targets begin with `at`.
    """
    readers = [m for m in modules if m.target.removeprefix(at) in group.readers]
    touched = readers + [m for m in modules if group.linear and m.target == at + group.linear]
    return group.scalable and any(m.quantized for m in readers) and all(m.kind != "kept" for m in touched)
