"""What `flexdecode mask` says: the grid, the ranges of keys that a query sees, and what decided.

Knows what explain.py found out, and no mask.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from flexdecode.cli.picture import glyphs, grid_lines

if TYPE_CHECKING:
    from flexdecode.attention.masks import Mask
    from flexdecode.cli.mask import Shown

_ROWS, _COLUMNS = 32, 64  # most cells of a printed grid of blocks
_RANGES = 12  # of positions that are written out


def lines(shown: Shown) -> Iterator[str]:
    """The whole report, a line each."""
    found = shown.map
    yield str(shown.mask)
    queries = "all queries" if shown.at is None else f"the query at {shown.at}"
    which = f", head {found.head} of {shown.heads}" if shown.densities else ""
    yield f"{queries} against {found.length} keys{which}"
    for group, density in zip(shown.alike, shown.densities, strict=False):
        named = f"head{'' if len(group) == 1 else 's'} {_ranges((head, head) for head in group)}"
        yield f"{named}: {density:.1%} of the pairs visible (--head {group[0]} shows it)"
    yield ""
    yield from _drawn(shown)
    yield ""
    yield from _told(shown) if shown.at is None else _told_row(shown)
    yield from _told_blocks(shown)


def _drawn(shown: Shown) -> Iterator[str]:
    grid = shown.grid()
    if not shown.by_token:
        room = shutil.get_terminal_size().columns - len(str(shown.map.length)) - 1
        grid = grid.at_most(_ROWS, max(1, min(_COLUMNS, room)))
    yield from grid_lines(grid)
    marks = "   ".join(f"{glyphs()[state]} {name}" for state, name in shown.legend().items())
    yield f"{marks}   (a row is {_count(grid.row, 'query', 'queries')}, a column {_count(grid.column, 'key', 'keys')})"


def _told(shown: Shown) -> Iterator[str]:
    found = shown.map
    yield f"{found.pairs:,} of {found.all_pairs:,} pairs of query and key are visible ({found.density:.1%})"


def _told_row(shown: Shown) -> Iterator[str]:
    found = shown.map
    seen = _ranges((span.first, span.last) for span in shown.row if span.state)
    yield f"sees {found.pairs:,} of {found.length:,} keys ({found.density:.1%}): {seen}"
    for by in dict.fromkeys(span.by for span in shown.row if not span.state):
        hidden = _ranges((span.first, span.last) for span in shown.row if not span.state and span.by == by)
        yield f"hidden by {_parts(by)}: {hidden}"


def _told_blocks(shown: Shown) -> Iterator[str]:
    from flexdecode.attention.reasons import State
    from flexdecode.attention.visible import BLOCK

    found, total, tiles = shown.map, shown.map.states_TN.size, len(shown.map.queries)
    yield (
        f"{_count(total, 'block', 'blocks')} of {BLOCK} keys against {_count(tiles, 'tile', 'tiles')} of queries, "
        "of which"
    )
    for state, word in ((State.FULL, "full"), (State.PARTIAL, "partial"), (State.SKIPPED, "skipped")):
        count = found.count(state)
        reasons = "; ".join(f"{n:,} by {_parts(by)}" for by, n in found.deciders(state).items())
        yield f"  {word:<8}{count:>9,}  {count / total:>6.1%}  {reasons}".rstrip()


def _ranges(ranges: Iterable[tuple[int, int]]) -> str:
    """Ascending ranges as text, neighbours joined, the middle of many left out: 0-3, 7, 4092-8191."""
    joined: list[tuple[int, int]] = []
    for first, last in ranges:
        if joined and joined[-1][1] == first - 1:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    if not joined:
        return "none"
    written = [str(first) if first == last else f"{first}-{last}" for first, last in joined]
    if len(written) <= _RANGES:
        return ", ".join(written)
    half = _RANGES // 2
    return f"{', '.join(written[:half])}, … {', '.join(written[-half:])} ({len(written)} ranges)"


def _parts(by: tuple[Mask, ...]) -> str:
    return ", ".join(map(str, by))


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
