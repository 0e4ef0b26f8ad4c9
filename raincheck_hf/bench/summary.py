"""From rows to figures: accuracy by turn, over turns and by position, and recovery."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raincheck_hf.bench.rows import Row
from raincheck_hf.bench.statistics import Interval, mean_interval, recovery_interval


@dataclass(frozen=True)
class Line:
    """One way on one task, model and selector.

    Attributes:
        task: The task.
        model: The model.
        selector: None for the full prefill.
        way: The way.
        boards: How many.
        by_turn: Accuracy in each turn.
        by_position: Accuracy at each position of the first turn's answer.
        span: What `accuracy` and `recovery` are over: `"turn 1"`, `"turns 2+"` or `"all turns"`.
        accuracy: Over the span.
        recovery: Over the span; None for full and hard.
        restored_from: Mean output position, from 1, from which on every visual token is visible
            to the first answer, over the boards where that comes to pass; None without any.
        ended_early: Boards whose first answer is shorter than the truth.
        ended_in_guard: Boards whose first answer ended before the first chunk could ride; on them
            raincheck is hard pruning until the next turn.
    """

    task: str
    model: str
    selector: str | None
    way: str
    boards: int
    by_turn: tuple[float, ...]
    by_position: tuple[float, ...]
    span: str
    accuracy: Interval
    recovery: Interval | None
    restored_from: float | None
    ended_early: int
    ended_in_guard: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        rounded = {
            name: [round(value, 6) for value in getattr(self, name)]
            for name in ("by_turn", "by_position")
        }
        recovered = None if self.recovery is None else self.recovery.to_dict()
        return {**vars(self), **rounded, "accuracy": self.accuracy.to_dict(), "recovery": recovered}


def summarise(rows: Sequence[Row]) -> list[Line]:
    """Lines in the order in which rows first come, for each span of turns that exists.

    Only boards on which full, hard and the way itself have all been measured count.
    """
    groups: dict[tuple[str, str], dict[tuple[str | None, str], dict[int, Row]]] = {}
    for row in rows:
        group = groups.setdefault((row["task"], row["model"]), {})
        group.setdefault((row["selector"], row["way"]), {})[row["board"]] = row
    lines: list[Line] = []
    for (task, model), group in groups.items():
        full = group.get((None, "full"), {})
        for (selector, way), own in group.items():
            hard = full if selector is None else group.get((selector, "hard"), {})
            boards = sorted(full.keys() & hard.keys() & own.keys())
            if boards:
                paired = [[some[board] for board in boards] for some in (full, hard, own)]
                lines += _lines((task, model, selector, way), *paired)
    return lines


def _lines(
    name: tuple[str, str, str | None, str], full: list[Row], hard: list[Row], own: list[Row]
) -> list[Line]:
    turns = len(own[0]["right"])
    spans = {"turn 1": slice(0, 1)}
    if turns > 1:
        spans |= {"turns 2+": slice(1, None), "all turns": slice(0, None)}
    marks = [row["right"] for row in own]
    by_turn = tuple(float(np.mean([_mean(board[at]) for board in marks])) for at in range(turns))
    first = np.array([board[0] for board in marks], dtype=float)
    lines = []
    for span, part in spans.items():
        full_means, hard_means, own_means = (_board_means(some, part) for some in (full, hard, own))
        recovered = None
        if name[3] not in ("full", "hard"):
            recovered = recovery_interval(full_means, hard_means, own_means)
        lines.append(
            Line(
                *name,
                boards=len(own),
                by_turn=by_turn,
                by_position=tuple(first.mean(axis=0).tolist()),
                span=span,
                accuracy=mean_interval(own_means),
                recovery=recovered,
                restored_from=_restored_from(own),
                ended_early=sum(len(row["said"][0]) < len(row["truth"][0]) for row in own),
                ended_in_guard=sum(
                    name[3] != "full" and len(row["said"][0]) <= row["guard_tokens"] for row in own
                ),
            )
        )
    return lines


def _board_means(rows: list[Row], part: slice) -> np.ndarray:
    """fp64 [N]: every turn of the part counts the same, however long its answer is."""
    return np.array([np.mean([_mean(turn) for turn in row["right"][part]]) for row in rows])


def _mean(marks: list[int]) -> float:
    return sum(marks) / len(marks)


def _restored_from(rows: list[Row]) -> float | None:
    """A chunk that rides in the pass that consumes y_t is first visible where y_(t+2) is made."""
    at = []
    for row in rows:
        steps = row["restored_per_step"]
        if steps and sum(steps) + len(row["selected"]) == row["n_visual"]:
            at.append(len(steps) + 2)
    return float(np.mean(at)) if at else None
