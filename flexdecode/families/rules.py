"""Weight rules: for every weight of the decoder, the tensors of the checkpoint that make it up, and their shapes.

Made from a ModelConfig and a table of Names, before a byte is read, so that a file that does not fit is refused at
once, by name. Knows no tensor arithmetic: a Part says what must be done to it, `models.load` does it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from flexdecode.checkpoints.source import Source
from flexdecode.config import AttentionConfig, ModelConfig, MoeConfig
from flexdecode.families.names import IGNORABLE, Names

Change = Literal["", "unpermute", "packed_gate_up", "packed_down", "packed_bias", "stacked"]


@dataclass(frozen=True)
class Part:
    """One tensor of the file. `shape` is what it becomes after `change`; `heads` serves "unpermute", `expert` the
    changes that take one expert out of a tensor of all."""

    name: str
    shape: tuple[int, ...]
    change: Change = ""
    heads: int = 0
    expert: int = -1
    experts: int = 0


@dataclass(frozen=True)
class Rule:
    """A matrix is its parts one below the other; so is its bias. Vectors have one part."""

    parts: tuple[Part, ...]
    bias: tuple[Part, ...] = ()

    def all(self) -> tuple[Part, ...]:
        return self.parts + self.bias


Rules = dict[str, Rule]


def rules(config: ModelConfig, names: Names, present: Collection[str]) -> Rules:
    """Rule by target: `embed`, `norm`, `head` (absent when tied), and `layers.{i}.` + qkv, out, gate_up, down, …"""
    table: Rules = {
        "embed": Rule((Part(f"{names.embed}.weight", (config.vocab_size, config.hidden_size)),)),
        "norm": Rule((Part(f"{names.norm}.weight", (config.hidden_size,)),)),
    }
    # The file decides: some tied models carry a head of their own, and then that one is meant.
    if f"{names.head}.weight" in present or not config.tie_word_embeddings:
        table["head"] = Rule((Part(f"{names.head}.weight", (config.vocab_size, config.hidden_size)),))
    for i in range(len(config.layers)):
        for target, rule in _layer(config, names, i):
            table[f"layers.{i}.{target}"] = rule
    return table


def _layer(config: ModelConfig, names: Names, i: int) -> Iterator[tuple[str, Rule]]:
    layer, prefix, hidden = config.layers[i], names.layer.format(i=i), config.hidden_size
    attention, ff = layer.attention, layer.feed_forward
    norms = {
        "attention_pre_norm": names.attention_pre_norm if layer.pre_norms else "",
        "attention_post_norm": names.attention_post_norm if layer.post_norms else "",
        "feed_forward_pre_norm": names.feed_forward_pre_norm if layer.pre_norms else "",
        "feed_forward_post_norm": names.feed_forward_post_norm if layer.post_norms else "",
    }
    for target, name in norms.items():
        if name:
            yield target, Rule((Part(f"{prefix}{name}.weight", (hidden,)),))
    yield from _attention(attention, names, prefix, hidden)
    if isinstance(ff, MoeConfig):
        yield from _experts(ff, names, prefix, hidden)
        return
    inner = ff.intermediate_size
    rows = [2 * inner] if len(names.gate_up) == 1 else [inner, inner]
    yield "gate_up", _matrix([prefix + n for n in names.gate_up], rows, hidden, ff.bias)
    yield "down", _matrix([prefix + names.down], [hidden], inner, ff.bias)


def _matrix(modules: list[str], rows: list[int], columns: int, bias: bool) -> Rule:
    parts = tuple(Part(f"{m}.weight", (r, columns)) for m, r in zip(modules, rows, strict=True))
    biases = tuple(Part(f"{m}.bias", (r,)) for m, r in zip(modules, rows, strict=True)) if bias else ()
    return Rule(parts, biases)


def _attention(a: AttentionConfig, names: Names, prefix: str, hidden: int) -> Iterator[tuple[str, Rule]]:
    modules = [prefix + n for n in names.qkv]
    heads = [a.heads, a.kv_heads, a.kv_heads]
    if len(modules) == 1:
        yield "qkv", _matrix(modules, [sum(heads) * a.head_dim], hidden, a.qkv_bias)
    else:
        changes: list[Change] = ["unpermute", "unpermute", ""] if names.permuted else ["", "", ""]

        def part(module: str, kind: str, count: int, change: Change, *columns: int) -> Part:
            return Part(f"{module}.{kind}", (count * a.head_dim, *columns), change, heads=count)

        zipped = list(zip(modules, heads, changes, strict=True))
        weights = tuple(part(m, "weight", h, c, hidden) for m, h, c in zipped)
        biases = tuple(part(m, "bias", h, c) for m, h, c in zipped) if a.qkv_bias else ()
        yield "qkv", Rule(weights, biases)
    yield "out", _matrix([prefix + names.out], [hidden], a.heads * a.head_dim, a.out_bias)
    if a.qk_norm != "none":
        q, k = (a.heads, a.kv_heads) if a.qk_norm == "all" else (1, 1)
        yield "q_norm", Rule((Part(f"{prefix}{names.q_norm}.weight", (q * a.head_dim,)),))
        yield "k_norm", Rule((Part(f"{prefix}{names.k_norm}.weight", (k * a.head_dim,)),))
    if a.sinks:
        yield "sinks", Rule((Part(prefix + names.sinks, (a.heads,)),))


def _experts(moe: MoeConfig, names: Names, prefix: str, hidden: int) -> Iterator[tuple[str, Rule]]:
    yield "router", _matrix([prefix + names.router], [moe.experts], hidden, moe.router_bias)
    inner = moe.intermediate_size
    for e in range(moe.experts):
        gate_up = [prefix + n.format(e=e) for n in names.expert_gate_up]
        down = prefix + names.expert_down.format(e=e)
        if names.packed_experts:
            up_bias = (Part(f"{gate_up[0]}_bias", (2 * inner,), "packed_bias", expert=e, experts=moe.experts),)
            down_bias = (Part(f"{down}_bias", (hidden,), "stacked", expert=e, experts=moe.experts),)
            yield (
                f"experts.{e}.gate_up",
                Rule(
                    (Part(gate_up[0], (2 * inner, hidden), "packed_gate_up", expert=e, experts=moe.experts),), up_bias
                ),
            )
            yield (
                f"experts.{e}.down",
                Rule((Part(down, (hidden, inner), "packed_down", expert=e, experts=moe.experts),), down_bias),
            )
        elif names.stacked_experts:

            def stack(module: str, rows: int, columns: int, e: int = e) -> Rule:
                weight = Part(f"{module}.weight", (rows, columns), "stacked", expert=e, experts=moe.experts)
                bias = Part(f"{module}.bias", (rows,), "stacked", expert=e, experts=moe.experts)
                return Rule((weight,), (bias,) if moe.bias else ())

            gate, up = (stack(m, inner, hidden) for m in gate_up)
            yield f"experts.{e}.gate_up", Rule(gate.parts + up.parts, gate.bias + up.bias)
            yield f"experts.{e}.down", stack(down, hidden, inner)
        else:
            yield f"experts.{e}.gate_up", _matrix(gate_up, [inner] * len(gate_up), hidden, moe.bias)
            yield f"experts.{e}.down", _matrix([down], [hidden], inner, moe.bias)


def check(table: Rules, names: Names, source: Source) -> None:
    """Refuse a file in which a tensor is missing, has another shape, or is left over. Reads headers only."""
    present = set(source.names())
    used: set[str] = set()
    for target, rule in table.items():
        for part in rule.all():
            files = file_names(part, present)
            used.update(files)
            missing = [name for name in files if name not in present]
            if missing:
                raise ValueError(
                    f"{source.path}: tensor {missing[0]!r} is missing (needed for {target}); the file is incomplete "
                    "or its config describes another model"
                )
            _check_shape(part, files, source)
    left = sorted(n for n in present - used if not n.endswith(IGNORABLE) and not n.startswith(names.drop or ("\0",)))
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ValueError(
            f"{source.path}: tensor {left[0]!r}{more} has no place in the model that the config describes "
            "(a bias that the config denies, an extra layer, another architecture); nothing is dropped in silence"
        )


def file_names(part: Part, present: Collection[str]) -> list[str]:
    """The tensors behind a part: one, or MXFP4's pair."""
    blocks = f"{part.name}_blocks"
    if part.change in ("packed_gate_up", "packed_down") and blocks in present:
        return [blocks, f"{part.name}_scales"]
    return [part.name]


def _check_shape(part: Part, files: list[str], source: Source) -> None:
    shape = source.shape(files[0])
    if len(files) == 2:
        rows, columns = part.shape
        expected: tuple[int, ...] = (part.experts, rows, columns // 32, 16)
    elif part.change in ("packed_gate_up", "packed_down"):
        expected = (part.experts, part.shape[1], part.shape[0])
    elif part.change in ("stacked", "packed_bias"):
        expected = (part.experts, *part.shape)
    else:
        expected = part.shape
    if tuple(shape) != expected:
        raise ValueError(
            f"{source.path}: tensor {files[0]!r} has shape {list(shape)}, the config asks for {list(expected)}"
        )
