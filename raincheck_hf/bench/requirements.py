"""Recovery beside what it is asked to reach, selector by selector."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raincheck_hf.bench.availability import nothing_rode
from raincheck_hf.bench.rows import Row
from raincheck_hf.bench.summary import ALL, Line, summarise
from raincheck_hf.bench.tables import Table, interval

LATER_TURNS = 0.90
"""Recovery on turns 2 and later, whatever the first answer was."""

ALL_TURNS = 0.777
"""Recovery over all turns where the first answer is long: the paper's mean on MultiVerse."""

_HEAD = (
    "model", "selector", "cells, turns 2+", "reading, turns 2+", f"≥ {LATER_TURNS:.2f}",
    "long first answers", "all turns", f"≥ {ALL_TURNS:.3f}", "first answer", "post-answer",
    "above it", "ended in the guard", "all turns of these",
)  # fmt: skip


def requirements_table(rows: Sequence[Row]) -> Table | None:
    """A line for each model and selector with which raincheck and post-answer read boards.

    Dialogues whose first answer ended inside the guard, where nothing can be restored before the
    next turn, stand in the last two columns, and not in those about long first answers.

    Args:
        rows: Of quality measurements, at one setting of retention, chunk and guard.

    Returns:
        None where no selector has rows of both ways.
    """
    body = []
    reading = [row for row in rows if row["task"] == "reading"]
    for model in dict.fromkeys(row["model"] for row in reading):
        names = [
            {row["selector"] for row in reading if (row["model"], row["way"]) == (model, way)}
            for way in ("raincheck", "post_answer")
        ]
        for selector in sorted(set.intersection(*names)):
            own = [
                row for row in rows if row["model"] == model and row["selector"] in (None, selector)
            ]
            body.append([model, selector, *_cells(own)])
    return Table("what is asked for, and what was found", _HEAD, body) if body else None


def _cells(rows: Sequence[Row]) -> list[str]:
    """Those behind the names; rows of one model and selector."""
    reading = [row for row in rows if row["task"] == "reading"]
    inside = {row["board"] for row in reading if nothing_rode(row)}
    cells = _spans(row for row in rows if row["task"] == "cells").get("turns 2+")
    later = _spans(reading).get("turns 2+")
    long = _spans(row for row in reading if row["board"] not in inside)
    guarded = _spans(row for row in reading if row["board"] in inside)
    after = _spans((row for row in reading if row["board"] not in inside), "post_answer")
    every, of_guarded = long.get("all turns"), guarded.get("all turns")
    first, rival = long.get("turn 1"), after.get("turn 1")
    count = str(first.boards) if first else "0"
    both = "-"
    if first and rival:
        both = _answer(first.accuracy.point > rival.accuracy.point)
    return [
        _recovered(cells), _recovered(later), _reached((cells, later), LATER_TURNS),
        count, _recovered(every), _reached((every,), ALL_TURNS),
        _accuracy(first), _accuracy(rival), both,
        str(len(inside)), _recovered(of_guarded),
    ]  # fmt: skip


def _spans(rows: Iterable[Row], way: str = "raincheck") -> dict[str, Line]:
    """A way's figures by span, over all boards of the rows."""
    lines = summarise(list(rows))
    return {line.span: line for line in lines if (line.way, line.dialogues) == (way, ALL)}


def _recovered(line: Line | None) -> str:
    return "-" if line is None else interval(line.recovery)


def _accuracy(line: Line | None) -> str:
    return "-" if line is None else f"{line.accuracy.point:.3f}"


def _reached(lines: Iterable[Line | None], least: float) -> str:
    """Whether every figure that there is reaches the mark; none where hard pruning lost nothing."""
    points = [line.recovery.point for line in lines if line and line.recovery]
    known = [point for point in points if point == point]
    return _answer(min(known) >= least) if known else "-"


def _answer(holds: bool) -> str:
    return "yes" if holds else "no"
