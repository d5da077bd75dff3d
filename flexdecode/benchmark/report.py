"""Rows about models as a table in Markdown, as CSV, and as lines of a plot. Measures nothing.

All rows of one report come from one benchmark.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexdecode.benchmark.rows import Row

FORMS = ("md", "csv", "json", "jsonl")
Cell = Callable[[Row], str]


def render(rows: Sequence[Row], form: str) -> str:
    """The rows in one of FORMS, with a newline at the end."""
    if form == "md":
        return markdown(rows)
    if form == "csv":
        return csv_text(rows)
    if form == "json":
        return json.dumps(list(rows), indent=2, allow_nan=False) + "\n"
    return "".join(json_line(row) for row in rows)


def json_line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def csv_text(rows: Sequence[Row]) -> str:
    """Every column that some row has; lists are JSON, what a row lacks is empty."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: json.dumps(x) if isinstance(x, (list, dict)) else x for key, x in row.items()})
    return text.getvalue()


def markdown(rows: Sequence[Row]) -> str:
    """What was measured on what, a table, and why each failed row failed."""
    if not rows:
        return ""
    table = _decode_table(rows) if rows[0]["benchmark"] == "decode" else _plain_table(rows)
    failures = [f"- {place(row)}: {row['failure']}" for row in rows if "failure" in row]
    return "\n".join([_caption(rows), "", *table, *(["", *failures] if failures else []), ""])


def progress(row: Row) -> str:
    """One row in one line."""
    if "failure" in row:
        return f"{place(row)}: FAILED: {row['failure']}"
    if row["benchmark"] == "engine":
        return f"{place(row)}: {row['times']:.2f} times as quick as {row['beside']}"
    return f"{place(row)}: {rate(row):.2f} tokens/s, {row['fraction_of_floor']:.0%} of the floor"


def place(row: Row) -> str:
    """Where a row stands in its table."""
    if row["benchmark"] == "engine":
        return str(row["work"])
    if row["benchmark"] in ("grid", "latency"):
        return f"batch {row['batch']}, {row['prefill_length']} + {row['decode_length']} tokens"
    return f"{row['context']} tokens" + (f", {row['backend']}" if "backend" in row else "")


def rate(row: Row) -> float:
    """The tokens a second that a row is about."""
    found: float = row["decode_tokens_per_second" if "decode_length" in row else "tokens_per_second"]
    return found


@dataclass(frozen=True)
class Line:
    """One line of a plot of tokens a second."""

    label: str
    points: tuple[tuple[int, float], ...]
    floor: bool = False


def lines(rows: Sequence[Row]) -> list[Line]:
    """Tokens a second against the context, a line for each backend or batch size, and the floor of each batch size (of
    the last of its backends). Failed rows are gaps."""
    measured = [row for row in rows if "failure" not in row]
    found = []
    for label in dict.fromkeys(_label(row) for row in measured):
        own = [row for row in measured if _label(row) == label]
        found.append(Line(label, tuple((_context(row), rate(row)) for row in own)))
    for batch in dict.fromkeys(row.get("batch", 1) for row in measured):
        floors = {_context(row): _floor(row) for row in measured if row.get("batch", 1) == batch}
        found.append(Line("floor" if batch == 1 else f"floor, batch {batch}", tuple(floors.items()), floor=True))
    return found


def _label(row: Row) -> str:
    return str(row["backend"] if "backend" in row else f"batch {row['batch']}" if "batch" in row else row["benchmark"])


def _context(row: Row) -> int:
    """Tokens; in a grid of prompt and answer together."""
    return int(row["context"] if "context" in row else row["prefill_length"] + row["decode_length"])


def _floor(row: Row) -> float:
    if "floor_tokens_per_second" in row:
        return float(row["floor_tokens_per_second"])
    return float(row["floor_steps_per_second"] * row["batch"])


def _caption(rows: Sequence[Row]) -> str:
    told = next((row for row in rows if "failure" not in row), rows[0])
    one_by_one = len({row.get("backend") for row in rows}) > 1 and told.get("in_turn") is False
    commit = "" if told["commit"] is None else f", commit {told['commit'][:10]}{' (changed)' if told['dirty'] else ''}"
    parts = [
        f"{told['benchmark'].capitalize()} of {told['model']}",
        *(f"{name} {told[key]}" for name, key in _HELD if key in told),
        *(["keys and values drawn at random"] if told.get("fill") == "random" else []),
        *(["backends one after the other"] if one_by_one else []),
        f"{told['threads']} thread{'' if told['threads'] == 1 else 's'} of {told['gpu'] or told['cpu']}",
        f"flexdecode {told['flexdecode']}{commit}, torch {told['torch']}, {told['date']}",
    ]
    return "; ".join(parts) + "."


_HELD = (("compute", "dtype"), ("weights", "quantization"), ("cache", "kv_dtype"), ("mask", "mask"))


def _decode_table(rows: Sequence[Row]) -> list[str]:
    """A line for each length, a column for each backend in tokens a second, and the last one over the first."""
    names = list(dict.fromkeys(row["backend"] for row in rows))
    lengths = sorted({row["context"] for row in rows})
    by = {(row["context"], row["backend"]): row for row in rows}
    many = len(names) > 1
    head = ["Length", *names, *(["Speedup"] if many else []), "of floor"]
    body = []
    for length in lengths:
        each = [by.get((length, name)) for name in names]
        last, first = each[-1], each[0]
        body.append([str(length), *(_cell(row, lambda row: f"{rate(row):.2f}") for row in each)])
        body[-1] += [speedup(first, last)] if many else []
        body[-1].append(_cell(last, lambda row: f"{row['fraction_of_floor']:.0%}"))
    return _table(head, body)


def speedup(first: Row | None, last: Row | None) -> str:
    """How many times as quick the last backend is: from rounds in which both ran, else from the two medians."""
    if first is None or last is None or "failure" in first or "failure" in last:
        return "–"
    paired = last.get(f"times_{first['backend']}")
    return f"{rate(last) / rate(first) if paired is None else paired:.2f}×"


def _cell(row: Row | None, shown: Cell) -> str:
    return "–" if row is None else "failed" if "failure" in row else shown(row)


def _plain_table(rows: Sequence[Row]) -> list[str]:
    columns = _COLUMNS[rows[0]["benchmark"]]
    body = [[shown(row) if name in _ALWAYS else _cell(row, shown) for name, shown in columns] for row in rows]
    return _table([name for name, _ in columns], body)


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    rows = [head, ["-" * 3 + ":"] * len(head), *body]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _gib(row: Row) -> str:
    held, peak = (f"{row[key] / 2**30:.2f}" if row[key] is not None else "–" for key in ("held_bytes", "peak_bytes"))
    return f"{held} GiB held, {peak} peak"


def _between(row: Row, name: str, per: float = 1.0) -> str:
    """A median and its quartiles in ms."""
    ms, low, high = (row[f"{name}ms{end}"] / per for end in ("", "_q1", "_q3"))
    return f"{ms:.1f} ({low:.1f}–{high:.1f})"


_OF_FLOOR: tuple[str, Cell] = ("of floor", lambda row: f"{row['fraction_of_floor']:.0%}")
_LENGTHS: tuple[tuple[str, Cell], ...] = (
    ("Batch Size", lambda row: str(row["batch"])),
    ("Prefill Length", lambda row: str(row["prefill_length"])),
    ("Decode Length", lambda row: str(row["decode_length"])),
)
_RATES: tuple[tuple[str, Cell], ...] = (
    ("Prefill tokens/s", lambda row: f"{row['prefill_tokens_per_second']:.2f}"),
    ("Decode tokens/s", lambda row: f"{row['decode_tokens_per_second']:.2f}"),
)
_COLUMNS: dict[str, tuple[tuple[str, Cell], ...]] = {
    "prefill": (
        ("Length", lambda row: str(row["context"])),
        ("ms", lambda row: _between(row, "")),
        ("tokens/s", lambda row: f"{row['tokens_per_second']:.2f}"),
        ("GFLOP/s", lambda row: f"{row['gflop_per_s']:.1f}"),
        ("of GEMM's", lambda row: f"{row['gemm_gflop_per_s']:.1f}"),
        _OF_FLOOR,
    ),
    "engine": (
        ("Work", lambda row: row["work"]),
        ("ms", lambda row: _between(row, "")),
        ("Beside", lambda row: row["beside"]),
        ("its ms", lambda row: f"{row['beside_ms']:.1f}"),
        ("times as quick", lambda row: f"{row['times']:.2f}×"),
    ),
    "grid": (*_LENGTHS, *_RATES, ("Memory", _gib), _OF_FLOOR),
    "latency": (
        *_LENGTHS,
        ("Latency ms", lambda row: _between(row, "total_")),
        ("Prefill ms", lambda row: _between(row, "prefill_")),
        ("Decode ms/token", lambda row: _between(row, "decode_", row["decode_length"] - 1)),
        *_RATES,
        ("Answer tokens/s", lambda row: f"{row['tokens_per_second']:.2f}"),
        ("All tokens/s", lambda row: f"{row['total_tokens_per_second']:.2f}"),
        _OF_FLOOR,
    ),
}
_ALWAYS = {"Work", "Length", "Batch Size", "Prefill Length", "Decode Length"}  # what failed rows have, too
