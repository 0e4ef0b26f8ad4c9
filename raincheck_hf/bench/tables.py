"""Figures as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raincheck_hf.bench.statistics import Interval
from raincheck_hf.bench.summary import Line


def render(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns under their heads; the first two are flush left, numbers flush right."""
    rows = [list(head), *(list(row) for row in body)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(
        [line(rows[0]), "  ".join("-" * width for width in widths), *map(line, rows[1:])]
    )


def quality_tables(lines: Sequence[Line]) -> str:
    """One table for each task and model."""
    parts = []
    for task, model in dict.fromkeys((line.task, line.model) for line in lines):
        own = [line for line in lines if (line.task, line.model) == (task, model)]
        draw = _reading if task == "reading" else _by_turn
        parts.append(f"{task}, {model}, {own[0].boards} boards\n{draw(own)}")
    return "\n\n".join(parts)


def _by_turn(lines: Sequence[Line]) -> str:
    spans = list(dict.fromkeys(line.span for line in lines))
    span = "turns 2+" if "turns 2+" in spans else spans[-1]
    rows = []
    for line in lines:
        if line.span != span:
            continue
        turns = [f"{value:.3f}" for value in line.by_turn]
        rows.append([*_name(line), *turns, _interval(line.accuracy), _interval(line.recovery)])
    turns = [f"turn {at + 1}" for at in range(len(lines[0].by_turn))]
    return render(["selector", "way", *turns, f"{span} [95 %]", f"recovery, {span} [95 %]"], rows)


def _reading(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        if line.span != "turn 1":
            continue
        after = "-"
        if line.restored_from is not None:
            # Positions count from 1.
            tail = line.by_position[int(np.ceil(line.restored_from)) - 1 :]
            after = f"{np.mean(tail):.3f} from {line.restored_from:.0f}" if tail else "-"
        ended = f"{line.ended_early} ({line.ended_in_guard})"
        figures = [_interval(line.accuracy), after, _interval(line.recovery), ended]
        rows.append([*_name(line), *figures])
    head = [
        "accuracy [95 %]",
        "once all is restored",
        "recovery [95 %]",
        "too short (in the guard)",
    ]
    return render(["selector", "way", *head], rows)


def _name(line: Line) -> list[str]:
    return [line.selector or "-", line.way]


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    if np.isnan(interval.point):
        return "no loss"
    return f"{interval.point:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
