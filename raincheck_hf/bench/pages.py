"""`raincheck-hf bench tables`: the tables of rows that were measured, also into a document.

A document has places for them, which are filled again whenever rows are measured again::

    <!-- table reading -->
    anything
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from raincheck_hf.bench.context import context_table, seen
from raincheck_hf.bench.gaps import gaps_table
from raincheck_hf.bench.kinds import base_of, of_one_kind, read_kinds
from raincheck_hf.bench.memory import memory_table
from raincheck_hf.bench.requirements import requirements_table
from raincheck_hf.bench.rows import Row
from raincheck_hf.bench.state_map import state_map_table
from raincheck_hf.bench.summary import Line, point_of, summarise
from raincheck_hf.bench.sweep import AXES, RIVALS, VALUES, Point, points_from, sweep_tables
from raincheck_hf.bench.tables import Table, tabulated
from raincheck_hf.config import RaincheckConfig

_PLACE = re.compile(r"(<!-- table (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.S)


def tables_of(paths: Iterable[Path]) -> dict[str, list[Table]]:
    """Tables by name: tasks, `sweep-AXIS`, `context`, `state-map`, `memory`, `gaps`, `origin`.

    Args:
        paths: JSON Lines, as the subcommands of `bench` write them; kinds may be mixed.

    Raises:
        ValueError: A file cannot be read, or none of the rows has a table.
    """
    kinds = read_kinds(paths)
    found: dict[str, list[Table]] = {}
    if "quality" in kinds:
        found |= _quality(of_one_kind(kinds["quality"]))
    for kind, table in (
        ("state_map", state_map_table), ("memory", memory_table), ("gaps", gaps_table)
    ):  # fmt: skip
        if kind in kinds:
            found[kind.replace("_", "-")] = [table(kinds[kind])]
    if not found:
        raise ValueError("no row has a table")
    rows = [row for some in kinds.values() for row in some]
    return {**found, "origin": [_origin(rows)]}


def fill(page: Path, tables: Mapping[str, Sequence[Table]]) -> list[str]:
    """Put tables into a document's places; a place without a table stays as it is.

    Args:
        page: The document; it is written anew.
        tables: By name.

    Returns:
        Names of the places that were filled.

    Raises:
        ValueError: The document cannot be read, or has no place for any of them.
    """
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the document at {str(page)!r} cannot be read: {error}") from error
    filled: list[str] = []

    def put(place: re.Match[str]) -> str:
        name = place["name"]
        if name not in tables:
            return place[0]
        filled.append(name)
        body = "\n\n".join(table.markdown() for table in tables[name])
        return f"{place[1]}\n{body}\n\n{place[3]}"

    text = _PLACE.sub(put, text)
    if not filled:
        places = ", ".join(tables)
        raise ValueError(
            f"{page} has no place for any of {places}: <!-- table NAME --> <!-- end -->"
        )
    page.write_text(text, encoding="utf-8")
    return filled


def _quality(rows: Sequence[Row]) -> dict[str, list[Table]]:
    lines = summarise(rows)
    base = base_of(lines)
    if base is None:
        return {}
    found: dict[str, list[Table]] = {}
    usual = [line for line in lines if line.way in _TABLED and base.fits(line)]
    for task in dict.fromkeys(line.task for line in usual):
        found[task] = tabulated([line for line in usual if line.task == task])
    shown = {line.point for line in usual}
    asked = requirements_table([row for row in rows if point_of(row) in shown])
    if asked and "reading" in found:
        found["reading"].append(asked)
    swept = _swept(lines)
    for axis in AXES:
        points = [
            point for selector in swept for point in _points(axis, base.config(selector), lines)
        ]
        if tables := sweep_tables(points, rows):
            found[f"sweep-{axis.replace('_', '-')}"] = tables
    some = [
        one
        for one in seen(rows)
        if base.along("retention", fields := one.fields) and fields["selector"] in swept
    ]
    some.sort(key=lambda one: (one.task, one.model, one.fields["selector"], one.initial))
    if some:
        found["context"] = [context_table(some)]
    return found


_TABLED = ("full", "hard", "raincheck", "post_answer")


def _swept(lines: Iterable[Line]) -> list[str]:
    """Selectors with which raincheck ran at several points."""
    points: dict[str, set[tuple[object, ...]]] = {}
    for line in lines:
        if line.way == "raincheck" and line.selector:
            points.setdefault(line.selector, set()).add(line.point)
    return [selector for selector, some in points.items() if len(some) > 1]


def _points(axis: str, start: RaincheckConfig, lines: Sequence[Line]) -> list[Point]:
    """Those on an axis, as far as lines know of them; a rival's at each guard that it ran with."""
    if axis not in RIVALS:
        return points_from(start, (axis,), _values(lines))
    guards = {
        start.guard_tokens if line.guard_tokens is None else line.guard_tokens
        for line in lines
        if (line.way, line.selector, line.retention, line.chunk_size or start.chunk_size)
        == (RIVALS[axis], start.selector, start.retention, start.chunk_size)
    }
    points = []
    for guard in sorted(guards):
        own = points_from(start.replace(guard_tokens=guard), (axis,), {})
        several = f", guard {guard}" if len(guards) > 1 else ""
        points += [replace(point, value=point.value + several) for point in own]
    return points


def _values(lines: Iterable[Line]) -> dict[str, list[float]]:
    """What raincheck ran with, by axis."""
    own = [line for line in lines if line.way == "raincheck"]
    return {axis: sorted({getattr(line, axis) for line in own}) for axis in VALUES}


def _origin(rows: Iterable[Row]) -> Table:
    body: dict[tuple[str, ...], int] = {}
    for row in rows:
        versions = row.get("versions") or {}
        packages = ", ".join(f"{name} {versions[name]}" for name in versions)
        place = (str(row.get("machine")), packages, str(row.get("commit")))
        body[place] = body.get(place, 0) + 1
    return Table(
        "where the rows come from",
        ["machine", "versions", "commit", "rows"],
        [[*place, str(count)] for place, count in body.items()],
        left=3,
    )
