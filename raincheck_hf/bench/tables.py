"""Figures as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raincheck_hf.bench.statistics import Interval
from raincheck_hf.bench.summary import ALL, Line


@dataclass(frozen=True)
class Table:
    """Figures under heads.

    Attributes:
        title: What they are of.
        head: Names of the columns.
        body: Cells by row.
        left: How many columns are flush left; the others are flush right.
    """

    title: str
    head: Sequence[str]
    body: Sequence[Sequence[str]]
    left: int = 2

    def text(self) -> str:
        """For a terminal, the title above."""
        return f"{self.title}\n{render(self.head, self.body, self.left)}"

    def markdown(self) -> str:
        """For a document, the title above."""
        rules = [":--" if at < self.left else "--:" for at in range(len(self.head))]
        rows = [f"| {' | '.join(row)} |" for row in (self.head, rules, *self.body)]
        return "\n".join([f"**{self.title}**", "", *rows])


def render(head: Sequence[str], body: Sequence[Sequence[str]], left: int = 2) -> str:
    """Columns under their heads; the first ``left`` are flush left, the others flush right."""
    rows = [list(head), *(list(row) for row in body)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(
        [line(rows[0]), "  ".join("-" * width for width in widths), *map(line, rows[1:])]
    )


def texts(tables: Sequence[Table]) -> str:
    """Tables for a terminal, one below the other."""
    return "\n\n".join(table.text() for table in tables)


def quality_tables(lines: Sequence[Line]) -> str:
    """One table for each task and model; dialogues that ended in the guard apart."""
    return texts(tabulated(lines))


def tabulated(lines: Sequence[Line]) -> list[Table]:
    """What `quality_tables` shows."""
    tables = []
    for task, model in dict.fromkeys((line.task, line.model) for line in lines):
        own = [line for line in lines if (line.task, line.model) == (task, model)]
        draw = _reading if task == "reading" else _cells
        tables.append(Table(f"{task}, {model}, {own[0].boards} boards", *draw(own)))
    return tables


def _cells(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    turns = [f"turn {at + 1}" for at in range(len(lines[0].by_turn))]
    several = len(turns) > 1
    head = ["selector", "way", *turns]
    head += ["turns 2+ [95 %]", "recovery, turns 2+", "all turns"] if several else ["recovery"]
    rows = []
    for spans in _by_name(lines):
        line = spans["turn 1"]
        cells = [*_name(line), *(f"{value:.3f}" for value in line.by_turn)]
        if several:
            later = spans["turns 2+"]
            cells += [interval(later.accuracy), interval(later.recovery)]
            cells.append(interval(spans["all turns"].recovery))
        else:
            cells.append(interval(line.recovery))
        rows.append(cells)
    return head, rows


def _reading(lines: Sequence[Line]) -> tuple[list[str], list[list[str]]]:
    several = len(lines[0].by_turn) > 1
    head = ["selector", "way", "reading [95 %]", "once all is restored", "recovery"]
    head += ["turns 2+", "recovery", "recovery, all turns"] if several else []
    head += ["too short (in the guard)"]
    rows = []
    for spans in _by_name(lines):
        line = spans["turn 1"]
        cells = [*_name(line), interval(line.accuracy), _tail(line), interval(line.recovery)]
        if several:
            later = spans["turns 2+"]
            cells += [f"{later.accuracy.point:.3f}", interval(later.recovery)]
            cells.append(interval(spans["all turns"].recovery))
        rows.append([*cells, f"{line.ended_early} ({line.ended_in_guard})"])
    return head, rows


def _by_name(lines: Sequence[Line]) -> list[dict[str, Line]]:
    """By span, the lines of each way of running and part of the boards."""
    found: dict[tuple[object, ...], dict[str, Line]] = {}
    for line in lines:
        found.setdefault((*line.point, line.dialogues), {})[line.span] = line
    return list(found.values())


def _tail(line: Line) -> str:
    """Accuracy where every visual token was visible."""
    if line.restored_from is None:
        return "-"
    values = line.by_position[int(np.ceil(line.restored_from)) - 1 :]  # positions count from 1
    return f"{np.mean(values):.3f} from {line.restored_from:.0f}" if values else "-"


def _name(line: Line) -> list[str]:
    part = "" if line.dialogues == ALL else f", {line.boards} {line.dialogues}"
    return [line.selector or "-", line.way + part]


def interval(value: Interval | None) -> str:
    """`point [low, high]`; a dash for none, words where hard pruning loses nothing."""
    if value is None:
        return "-"
    if np.isnan(value.point):
        return "no loss"
    return f"{value.point:.3f} [{value.low:.3f}, {value.high:.3f}]"
