"""Rows from files, sorted: what kind each is, and which of them belong side by side."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raincheck_hf.bench.rows import KEY, Row, key_of
from raincheck_hf.bench.summary import Line
from raincheck_hf.config import RaincheckConfig

_SAME = ("weights", "dtype", "device", "size", "turns", "seed")


def read_kinds(paths: Iterable[Path]) -> dict[str, list[Row]]:
    """Rows by what measured them.

    Args:
        paths: JSON Lines, as the subcommands of `bench` write them; kinds may be mixed.

    Raises:
        ValueError: A file cannot be read.
    """
    kinds: dict[str, list[Row]] = {}
    for path in paths:
        for row in _rows(path):
            kinds.setdefault(_kind(row), []).append(row)
    return kinds


def _rows(path: Path) -> Iterator[Row]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the rows at {str(path)!r} cannot be read: {error}") from error
    left = 0
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            yield row
        else:
            left += 1
    if left:
        print(f"{path}: {left} unreadable line(s) left alone", file=sys.stderr)


def _kind(row: Row) -> str:
    kind = str(row.get("bench") or row.get("part") or row.get("measure") or "unknown")
    return "unknown" if kind == "quality" and not row.keys() >= set(KEY) else kind


def of_one_kind(rows: Iterable[Row]) -> list[Row]:
    """Quality rows that can be compared, none twice.

    Where those of a task and model differ in board size, seed or the like, the most frequent kind
    is taken.
    """

    def kind(row: Row) -> str:
        return str([row[field] for field in _SAME])

    once = {key_of(row): row for row in rows}  # files may share rows
    counts: dict[tuple[str, str], Counter[str]] = {}
    for row in once.values():
        counts.setdefault((row["task"], row["model"]), Counter())[kind(row)] += 1
    usual = {place: counter.most_common(1)[0][0] for place, counter in counts.items()}
    return [row for row in once.values() if kind(row) == usual[row["task"], row["model"]]]


@dataclass(frozen=True)
class Base:
    """What raincheck ran with in most places, from which an axis of a sweep starts."""

    retention: float
    chunk_size: int
    guard_tokens: int

    def config(self, selector: str) -> RaincheckConfig:
        """The configuration with a selector."""
        return RaincheckConfig(selector=selector, **vars(self))

    def fits(self, line: Line) -> bool:
        """Whether a line belongs beside raincheck's here; None means that it does not matter."""
        return line.way == "full" or all(
            getattr(line, field) in (None, wanted) for field, wanted in vars(self).items()
        )

    def along(self, axis: str, point: Mapping[str, Any]) -> bool:
        """Whether raincheck ran as here, but for one axis."""
        return point["way"] == "raincheck" and all(
            field == axis or point[field] == wanted for field, wanted in vars(self).items()
        )


def base_of(lines: Sequence[Line]) -> Base | None:
    """The most frequent one; None where raincheck did not run."""
    counts = Counter(
        (line.retention, line.chunk_size, line.guard_tokens)
        for line in lines
        if line.chunk_size is not None and line.guard_tokens is not None
    )
    if not counts:
        return None
    retention, chunk_size, guard_tokens = counts.most_common(1)[0][0]
    assert chunk_size is not None and guard_tokens is not None  # as counted
    return Base(retention, chunk_size, guard_tokens)
