"""From rows to figures: accuracy by turn, over turns and by position, and recovery."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raincheck_hf.bench.availability import nothing_rode
from raincheck_hf.bench.rows import Row
from raincheck_hf.bench.statistics import Interval, mean_interval, recovery_interval

POINT = ("selector", "way", "retention", "chunk_size", "guard_tokens")
"""Fields that say how a conversation was run; those of `settings.point_fields`."""

ALL, PAST_GUARD, IN_GUARD = "all", "past the guard", "in the guard"


@dataclass(frozen=True)
class Line:
    """One way of running on one task and model, over one span of turns.

    Attributes:
        task: The task.
        model: The model.
        selector: None for the full prefill.
        way: The way.
        retention: Fraction of visual tokens in the initial prefill.
        chunk_size: Deferred tokens a decode pass; None where nothing rides.
        guard_tokens: Plain decode passes first; None where nothing rides.
        dialogues: Which boards count: `"all"`, or, where there are both, those whose first answer
            with this way went on `"past the guard"`, and those where it ended `"in the guard"`, so
            that nothing could be restored before the next turn.
        boards: How many they are.
        by_turn: Accuracy in each turn.
        by_position: Accuracy at each position of the first turn's answer.
        span: What `accuracy` and `recovery` are over: `"turn 1"`, `"turn 2"`, ..., `"turns 2+"`
            or `"all turns"`.
        accuracy: Over the span.
        full: Accuracy of the full prefill on the same boards.
        hard: Accuracy of hard pruning with the same selections, likewise.
        recovery: Over the span; None for full and hard.
        restored_from: Mean output position, from 1, from which on every visual token is visible
            to the first answer, over the boards where that comes to pass; None without any.
        ended_early: Boards whose first answer is shorter than the truth.
        ended_in_guard: Boards whose first answer ended in the guard.
    """

    task: str
    model: str
    selector: str | None
    way: str
    retention: float
    chunk_size: int | None
    guard_tokens: int | None
    dialogues: str
    boards: int
    by_turn: tuple[float, ...]
    by_position: tuple[float, ...]
    span: str
    accuracy: Interval
    full: float
    hard: float
    recovery: Interval | None
    restored_from: float | None
    ended_early: int
    ended_in_guard: int

    @property
    def point(self) -> tuple[Any, ...]:
        """The fields of `POINT`."""
        return tuple(getattr(self, field) for field in POINT)

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
    groups: dict[tuple[str, str], dict[tuple[Any, ...], dict[int, Row]]] = {}
    for row in rows:
        group = groups.setdefault((row["task"], row["model"]), {})
        group.setdefault(point_of(row), {})[row["board"]] = row
    lines: list[Line] = []
    for group in groups.values():
        full = _rows_of(group, "full")
        for point, own in group.items():
            selector, way, retention, *_ = point
            hard = full if way == "full" else _rows_of(group, "hard", selector, retention)
            for dialogues, boards in _parts(own, sorted(full.keys() & hard.keys() & own.keys())):
                paired = [[some[board] for board in boards] for some in (full, hard, own)]
                lines += _lines(dialogues, *paired)
    return lines


def point_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """How a row's conversation was run."""
    return tuple(row[field] for field in POINT)


def _rows_of(
    group: Mapping[tuple[Any, ...], dict[int, Row]],
    way: str,
    selector: str | None = None,
    retention: float | None = None,
) -> dict[int, Row]:
    """By board, the rows of one way; for hard, of one selector and retention."""
    found: dict[int, Row] = {}
    for (own_selector, own_way, own_retention, *_), rows in group.items():
        if own_way == way and (
            way == "full" or (own_selector, own_retention) == (selector, retention)
        ):
            found |= rows
    return found


def _parts(own: Mapping[int, Row], boards: list[int]) -> Iterator[tuple[str, list[int]]]:
    """All boards, then the two parts of them where neither part is empty."""
    inside = [board for board in boards if nothing_rode(own[board])]
    if boards:
        yield ALL, boards
    if inside and len(inside) < len(boards):
        yield PAST_GUARD, [board for board in boards if board not in inside]
        yield IN_GUARD, inside


def _lines(dialogues: str, full: list[Row], hard: list[Row], own: list[Row]) -> Iterator[Line]:
    row = own[0]
    turns = len(row["right"])
    spans = {f"turn {at + 1}": slice(at, at + 1) for at in range(turns)}
    if turns > 1:
        spans |= {"turns 2+": slice(1, None), "all turns": slice(0, None)}
    marks = [some["right"] for some in own]
    by_turn = tuple(float(np.mean([_mean(board[at]) for board in marks])) for at in range(turns))
    first = np.array([board[0] for board in marks], dtype=float)
    for span, part in spans.items():
        full_means, hard_means, own_means = (_board_means(some, part) for some in (full, hard, own))
        recovered = None
        if row["way"] not in ("full", "hard"):
            recovered = recovery_interval(full_means, hard_means, own_means)
        point = dict(zip(POINT, point_of(row), strict=True))
        yield Line(
            task=row["task"],
            model=row["model"],
            **point,
            dialogues=dialogues,
            boards=len(own),
            by_turn=by_turn,
            by_position=tuple(first.mean(axis=0).tolist()),
            span=span,
            accuracy=mean_interval(own_means),
            full=float(full_means.mean()),
            hard=float(hard_means.mean()),
            recovery=recovered,
            restored_from=_restored_from(own),
            ended_early=sum(len(row["said"][0]) < len(row["truth"][0]) for row in own),
            ended_in_guard=sum(map(nothing_rode, own)),
        )


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
