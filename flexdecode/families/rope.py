"""transformers' rope parameters to RopeConfig. The formulas themselves live in `models.rope`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from flexdecode.config import RopeConfig, RopeType

# Which parameters each type reads, beside rope_type and rope_theta; anything else is refused by name.
_PARAMETERS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset(
        "factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim "
        "truncate".split()
    ),
    "longrope": frozenset("factor original_max_position_embeddings attention_factor short_factor long_factor".split()),
    "llama3": frozenset("factor original_max_position_embeddings low_freq_factor high_freq_factor".split()),
    "proportional": frozenset({"factor"}),
}


def read_rope(
    parameters: Mapping[str, Any] | None,
    *,
    head_dim: int,
    max_position: int,
    original_max_position: int | None,
    where: str,
    default_theta: float = 10000.0,
) -> RopeConfig:
    """One layer kind's RopeConfig. Raises ValueError for a type or a parameter that is not known."""
    p = {k: v for k, v in (parameters or {}).items() if v is not None}
    kind = p.get("rope_type", p.get("type", "default"))
    if kind not in get_args(RopeType):
        raise ValueError(f"{where}: rope_type {kind!r} is not supported (known: {', '.join(get_args(RopeType))})")
    share = float(p.get("partial_rotary_factor", 1.0))
    common = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    unknown = sorted(set(p) - common - _PARAMETERS[kind])
    # A plain rope may carry the leftovers of a scaling that was switched off; they change nothing there.
    if unknown and kind != "default":
        raise ValueError(f"{where}: rope parameter {unknown[0]!r} = {p[unknown[0]]!r} is not known for type {kind!r}")
    needed = {"linear": ["factor"], "dynamic": ["factor"], "longrope": ["short_factor", "long_factor"]}
    needed["llama3"] = ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    for key in needed.get(kind, ()):
        if key not in p:
            raise ValueError(f"{where}: rope type {kind!r} needs {key!r}, which the config does not give")
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * share)
    original = int(p.get("original_max_position_embeddings") or original_max_position or max_position)
    short, long = (tuple(float(x) for x in p.get(k, ())) for k in ("short_factor", "long_factor"))
    for name, factors in (("short_factor", short), ("long_factor", long)):
        if kind == "longrope" and len(factors) != rotary_dim // 2:
            raise ValueError(
                f"{where}: rope {name} has {len(factors)} values, but {rotary_dim} rotary dimensions need "
                f"{rotary_dim // 2}"
            )
    factor = p.get("factor")
    if factor is None:
        factor = max_position / original if kind in ("longrope", "yarn") else 1.0
    optional: dict[str, float] = {k: float(p[k]) for k in ("attention_factor", "mscale", "mscale_all_dim") if k in p}
    tuned = ("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor")
    optional.update({k: float(p[k]) for k in tuned if k in p})
    return RopeConfig(
        theta=float(p.get("rope_theta", default_theta)),
        rotary_dim=rotary_dim,
        type=kind,
        max_position=max_position,
        factor=float(factor),
        original_max_position=original,
        truncate=bool(p.get("truncate", True)),
        short_factor=short,
        long_factor=long,
        proportion=share if kind == "proportional" else 1.0,
        **optional,
    )
