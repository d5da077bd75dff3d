"""Which matrices of a model are quantized and how, decided from names and shapes before a weight is read.

A decoder's `target` (layers.0.qkv) is one or more stored matrices, one below the other: each is a Module. Knows no
calibration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flexdecode.families.rules import Rules
from flexdecode.quantizer.options import GROUPS, Options, pattern

Kind = Literal["int4", "int8", "float", "kept"]
_FUSED_EXPERTS = ("packed_gate_up", "packed_down")


@dataclass(frozen=True)
class Module:
    """A stored matrix: its name in the saved file without `.weight`, and the rows [start, stop) of the target that it
    makes up. kind `kept` is a matrix whose tensor is copied as the file has it, being stored with others."""

    name: str
    target: str
    start: int
    stop: int
    columns: int
    kind: Kind
    group: int = 0
    why: str = ""

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.columns

    @property
    def quantized(self) -> bool:
        return self.kind in ("int4", "int8")


def choose(table: Rules, options: Options, where: str) -> list[Module]:
    """Every matrix of the layers, with what becomes of it. `table` is that of the saved file.

    Raises ValueError, naming the matrix, its size and what would fit, for one that the group or the format does not
    fit; for an entry of `skip` that matches nothing; and where nothing would be quantized.
    """
    skips = [(text, pattern(text)) for text in options.skip]
    modules: list[Module] = []
    matched: set[str] = set()
    for target, rule in table.items():
        if not target.startswith("layers.") or len(rule.parts[0].shape) != 2:
            continue
        start = 0
        for part in rule.parts:
            name = part.name.removesuffix(".weight")
            rows, columns = part.shape
            hits = [text for text, wanted in skips if wanted.fullmatch(name)]
            matched.update(hits)
            fit: Fit
            if part.change in _FUSED_EXPERTS:
                fit = "kept", 0, "experts stored in one tensor"
            elif target.endswith(".router"):
                fit = "float", 0, "router"
            elif hits:
                fit = "float", 0, f"--skip {hits[0]}"
            else:
                fit = _fit(name, rows, columns, options, where)
            modules.append(Module(name, target, start, start + rows, columns, *fit))
            start += rows
    missed = [text for text in options.skip if text not in matched]
    if missed:
        raise ValueError(f"{where}: --skip {missed[0]!r} matches no matrix, such as {modules[0].name}; correct it")
    if not any(module.quantized for module in modules):
        raise ValueError(f"{where}: nothing would be quantized: {modules[0].name} is left ({modules[0].why})")
    return modules


Fit = tuple[Kind, int, str]


def _fit(name: str, rows: int, columns: int, options: Options, where: str) -> Fit:
    if options.bits == 8:
        return "int8", -1, ""
    fault = _fault(rows, columns, options.group_size, options)
    if fault is None:
        return "int4", options.group_size, ""
    usable = [g for g in GROUPS if _fault(rows, columns, g, options) is None]
    if options.odd_widths == "smaller" and any(g < options.group_size for g in usable):
        group = max(g for g in usable if g < options.group_size)
        return "int4", group, f"group {group}: {fault}"
    if options.odd_widths != "refuse":
        return "float", 0, fault
    if _fault(rows, columns, -1, options) is None:
        usable.append(-1)
    remedy = f"usable groups: {', '.join(map(str, usable))}; or " if usable else ""
    smaller = "smaller with --format compressed-tensors" if options.layout == "gemm" else "smaller"
    raise ValueError(f"{where}: {name} {fault}; {remedy}--odd-widths leave (or {smaller}), or --skip it")


def _fault(rows: int, columns: int, group: int, options: Options) -> str | None:
    """Why a matrix cannot be held in int4 in groups of `group`."""
    if columns % 2:
        return f"has {columns} columns, and int4 needs an even number"
    if group > columns:
        return f"has {columns} columns, fewer than a group of {group}"
    if group != -1 and columns % group:
        return f"has {columns} columns, which groups of {group} do not divide"
    if options.layout == "gemm" and rows % 8:
        return f"has {rows} rows, and awq-gemm packs rows by 8"
    return None


def by_target(modules: Sequence[Module]) -> dict[str, list[Module]]:
    found: dict[str, list[Module]] = {}
    for module in modules:
        found.setdefault(module.target, []).append(module)
    return found
