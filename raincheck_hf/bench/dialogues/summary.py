"""From rows to figures: scores by turn and over turns, and recovery, over whole dialogues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raincheck_hf.bench.dialogues.plan import RUN
from raincheck_hf.bench.rows import Row
from raincheck_hf.bench.statistics import Interval, mean_interval, recovery_interval
from raincheck_hf.bench.tables import render

SPANS: Mapping[str, slice] = {
    "turn 1": slice(0, 1),
    "turns 2+": slice(1, None),
    "all turns": slice(0, None),
}

Run = tuple[Any, ...]
"""Values of `plan.RUN`."""
Talk = list[Row]
"""A dialogue's turns in order."""


@dataclass(frozen=True)
class Line:
    """One way with one selector on one model, over one span of turns.

    Attributes:
        model: The model.
        selector: None for the full prefill.
        way: The way.
        settings: All of how it was run: the fields of `plan.RUN`.
        span: A key of `SPANS`.
        dialogues: How many have a scored turn in the span.
        by_turn: Mean score in each turn; None where no dialogue is scored.
        score: Mean over dialogues of each one's mean over the span.
        recovery: (way - hard) / (full - hard); None for full and hard, or without one of them.
        late: Dialogues whose first answer ended before any deferred token was restored; up to
            there raincheck can only be as good as hard pruning.
    """

    model: str
    selector: str | None
    way: str
    settings: dict[str, Any]
    span: str
    dialogues: int
    by_turn: tuple[float | None, ...]
    score: Interval
    recovery: Interval | None
    late: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            **vars(self),
            "score": self.score.to_dict(),
            "recovery": None if self.recovery is None else self.recovery.to_dict(),
        }


def summarise(rows: Iterable[Row]) -> list[Line]:
    """Lines for each span, in the order in which ways first come.

    A dialogue counts if every way that was run has answered all of it, and every turn that is to
    be scored has its score; so all ways are compared on the same dialogues.

    Args:
        rows: With `score`.
    """
    runs: dict[Run, dict[str, dict[int, Row]]] = {}
    for row in rows:
        own = runs.setdefault(tuple(row[field] for field in RUN), {})
        own.setdefault(f"{row['dialogue']} {row['digest']}", {})[row["turn"]] = row
    held = {
        run: {name: done for name, turns in own.items() if (done := _whole(turns))}
        for run, own in runs.items()
    }
    names = [
        name for name in next(iter(held.values()), {}) if all(name in own for own in held.values())
    ]
    lines: list[Line] = []
    for run, talks in held.items():
        about = dict(zip(RUN, run, strict=True))
        sides = [[talks[name] for name in names]]
        for way in ("full", "hard"):
            rival = _rival(held, about, way)
            sides.append([] if rival is None else [held[rival][name] for name in names])
        for span, part in SPANS.items():
            if line := _line(about, span, part, *sides):
                lines.append(line)
    return lines


def waiting(rows: Iterable[Row]) -> int:
    """How many answers have no score yet, and are to have one."""
    return sum(row["score"] is None and row["scoring"] != "none" for row in rows)


def table(lines: Sequence[Line]) -> str:
    """Text for a terminal, one table a model."""
    parts = []
    for model in dict.fromkeys(line.model for line in lines):
        own = [line for line in lines if line.model == model]
        spans = [span for span in SPANS if any(line.span == span for line in own)]
        ways: dict[tuple[Any, ...], dict[str, Line]] = {}
        for line in own:
            ways.setdefault(tuple(line.settings.values()), {})[line.span] = line
        head = ["selector", "way", "retention"]
        for span in spans:
            head += [f"{span} [95 %]", "recovery [95 %]"]
        body = []
        for by_span in ways.values():
            some = next(iter(by_span.values()))
            cells = [some.selector or "-", some.way, f"{some.settings['retention']:g}"]
            for span in spans:
                here = by_span.get(span)
                cells.append(_interval(here.score if here else None))
                cells.append(_interval(here.recovery if here else None))
            body.append([*cells, str(max(line.late for line in by_span.values()))])
        count = max(line.dialogues for line in own)
        head.append("first answer restored nothing")
        parts.append(f"{model}, {count} dialogues\n{render(head, body)}")
    return "\n\n".join(parts)


def _whole(turns: Mapping[int, Row]) -> list[Row]:
    """A dialogue's rows in order if none is missing and none waits for its score, else none."""
    rows = [turns[turn] for turn in sorted(turns)]
    return [] if len(rows) < rows[0]["turns"] or waiting(rows) else rows


def _rival(held: Iterable[Run], about: Row, way: str) -> Run | None:
    """`full` or `hard` under the same settings."""
    same = ["model", "weights", "dtype", "device", "seed", "max_new_tokens"]
    if way == "hard":
        same += ["retention", "selector"]
    for run in held:
        other = dict(zip(RUN, run, strict=True))
        if other["way"] == way and all(other[field] == about[field] for field in same):
            return run
    return None


def _line(
    about: Row, span: str, part: slice, own: list[Talk], full: list[Talk], hard: list[Talk]
) -> Line | None:
    means = [_mean(talk[part]) for talk in own]
    chosen = [at for at, mean in enumerate(means) if mean is not None]
    if not chosen:
        return None

    def samples(talks: list[Talk]) -> np.ndarray:
        return np.array([_mean(talks[at][part]) for at in chosen], dtype=float)

    recovered = None
    if about["way"] not in ("full", "hard") and full and hard:
        recovered = recovery_interval(samples(full), samples(hard), samples(own))
    longest = max(len(talk) for talk in own)
    return Line(
        model=about["model"],
        selector=about["selector"],
        way=about["way"],
        settings=about,
        span=span,
        dialogues=len(chosen),
        by_turn=tuple(_mean([talk[at] for talk in own if at < len(talk)]) for at in range(longest)),
        score=mean_interval(samples(own)),
        recovery=recovered,
        late=sum(
            talk[0]["n_selected"] < talk[0]["n_visual"] and not talk[0]["restored_in_answer"]
            for talk in own
        ),
    )


def _mean(rows: Iterable[Row]) -> float | None:
    """Over the rows that are scored; None without any."""
    given = [row["score"] for row in rows if row["score"] is not None]
    return sum(given) / len(given) if given else None


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    if np.isnan(interval.point):
        return "no loss"
    return f"{interval.point:.3f} [{interval.low:.3f}, {interval.high:.3f}]"
