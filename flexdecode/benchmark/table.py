"""Rows of `bench kernels` as lines to read, one a row, under a heading for each section and number of threads."""

from __future__ import annotations

from typing import Any

_MEASURED = (("ms", 10), ("rate", 15), ("of ceiling", 17), ("error", 9))
_ATTENTION = (("keys", 8), ("queries", 8), ("head dim", 9), ("group", 6), ("kv heads", 9), ("kv", 9), *_MEASURED)
_PRODUCT = (("weights", 14), ("group", 6), ("rows", 6), *_MEASURED)


def heading(row: dict[str, Any]) -> str:
    """What stands above a row and those like it."""
    threads = f"{row['threads']} thread{'' if row['threads'] == 1 else 's'}"
    columns = "".join(name.rjust(width) for name, width in _widths(row))
    return f"{row['section']}, {threads}, {row['isa']}\n{columns}   beside (their time over ours)"


def line(row: dict[str, Any]) -> str:
    """One row."""
    if _is_product(row):
        found = [f"{row['outputs']}x{row['inputs']}", row["group_size"] or "–", row["rows"]]
    else:
        found = [f"{row['keys']:,}", f"{row['queries']:,}", row["head_dim"], row["group"]]
        found += [row["kv_heads"], row["kv_dtype"]]
    reason = row.get("failure") or row.get("skipped")
    if reason is not None:
        return _aligned(found, row) + f"   {'FAILED' if 'failure' in row else 'skipped'}: {reason}{_mods(row)}"
    unit, name = ("gflop_per_s", "GFLOP/s") if "flops" in row else ("gb_per_s", "GB/s")
    found.append(f"{row['ms']:.3f}")
    if "fraction" in row:
        found += [f"{row[unit]:.1f} {name}", f"{row['fraction']:.0%} of {row['ceiling_' + unit]:.1f}"]
    else:
        found += ["–", "–"]
    found.append(f"{row['error']:.1e}")
    return f"{_aligned(found, row)}   {', '.join(_beside(row))}{_mods(row)}"


def _is_product(row: dict[str, Any]) -> bool:
    return row.get("kernel") == "product"


def _widths(row: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    return _PRODUCT if _is_product(row) else _ATTENTION


def _aligned(found: list[Any], row: dict[str, Any]) -> str:
    return "".join(str(value).rjust(width) for value, (_, width) in zip(found, _widths(row), strict=False))


def _beside(row: dict[str, Any]) -> list[str]:
    told = [f"{key[6:].replace('_', ' ')} {row[key]:.2f}" for key in row if key.startswith("times_")]
    told += [f"{row[key]:.2%} {key.replace('_', ' ')}" for key in row if key.startswith("share_of_")]
    told += [f"{key[:-3].replace('_', ' ')} {row[key]:.3f} ms" for key in row if key.endswith("plan_ms")]
    told += [f"{row[key]:.2f} {key.replace('_', ' ')}" for key in row if key.startswith("over_")]
    return told + [f"{key.replace('_', ' ')} {row[key]:.1e}" for key in row if key.endswith("error_to_fp32")]


def _mods(row: dict[str, Any]) -> str:
    """The mask and the score modification, where they are not the usual."""
    told = [str(row[key]) for key in ("mask", "score") if row.get(key) not in (None, "causal()")]
    return f"   [{', '.join(told)}]" if told else ""
