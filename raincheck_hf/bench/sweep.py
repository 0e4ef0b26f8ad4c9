"""`raincheck-hf bench sweep`: one choice after the other is varied, the others stay."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raincheck_hf.bench.availability import shares
from raincheck_hf.bench.collect import collect
from raincheck_hf.bench.quality import describe, write_figures
from raincheck_hf.bench.rows import Row
from raincheck_hf.bench.settings import Job, Label, Settings, point_fields
from raincheck_hf.bench.summary import ALL, POINT, Line, point_of, summarise
from raincheck_hf.bench.tables import Table, interval, texts
from raincheck_hf.config import RaincheckConfig

VALUES: Mapping[str, tuple[float, ...]] = {
    "retention": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7),
    "chunk_size": (7, 15, 31, 63),
    "guard_tokens": (0, 8, 16, 32),
}
"""Axes along which a field of the configuration is varied."""

RIVALS: Mapping[str, str] = {
    "defer": "post_answer",
    "order": "relevance",
    "correction": "uncorrected",
    "visibility": "by_position",
}
"""Axes along which raincheck is set against another way (a key of `ways.WAYS`)."""

AXES = (*VALUES, *RIVALS)


@dataclass(frozen=True)
class Point:
    """One point on an axis.

    Attributes:
        axis: A name of `AXES`.
        value: What is varied, in words.
        way: How it runs.
        base: What raincheck itself runs with.
    """

    axis: str
    value: str
    way: str
    base: RaincheckConfig

    @property
    def key(self) -> tuple[Any, ...]:
        """As `summary.point_of` has it of the point's rows."""
        fields = point_fields(self.way, self.base)
        return tuple(fields[name] for name in POINT)


@dataclass(frozen=True)
class Sweep:
    """A measurement along axes.

    Attributes:
        settings: Models, boards and selectors, and what every axis starts from.
        axes: Names of `AXES`.
        values: Instead of those in `VALUES`, for some of its axes.
        baselines: Ways that each point is compared with.
    """

    settings: Settings
    axes: tuple[str, ...] = AXES
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    baselines: tuple[str, ...] = ("full", "hard")

    def __post_init__(self) -> None:
        """Refuse before anything runs.

        Raises:
            ValueError: Names what is wrong and what is allowed.
        """
        if unknown := sorted(set(self.axes) - set(AXES)):
            raise ValueError(f"unknown axis {', '.join(unknown)}; known: {', '.join(AXES)}")
        self.points()  # a value out of range raises here

    @property
    def seed(self) -> int:
        """See `settings.Measurement`."""
        return self.settings.seed

    @property
    def device(self) -> str:
        """See `settings.Measurement`."""
        return self.settings.device

    @property
    def dtype(self) -> str:
        """See `settings.Measurement`."""
        return self.settings.dtype

    def jobs(self) -> Iterator[Job]:
        """See `settings.Measurement`."""
        return self.settings.jobs()

    def labels(self, job: Job) -> list[Label]:
        """For each point its baselines and the point itself."""
        ways = [
            (way, point.base) for point in self.points() for way in (*self.baselines, point.way)
        ]
        return self.settings.labels_of(job, ways)

    def points(self) -> list[Point]:
        """All points, selector by selector and axis by axis."""
        return [
            point
            for selector in self.settings.selectors
            for point in points_from(self.settings.config(selector, 0), self.axes, self.values)
        ]


def points_from(
    start: RaincheckConfig, axes: Sequence[str], values: Mapping[str, Sequence[float]]
) -> list[Point]:
    """Points along axes from one configuration.

    Args:
        start: What every axis starts from.
        axes: Names of `AXES`.
        values: Instead of those in `VALUES`, for some axes.

    Raises:
        ValueError: A value is out of range.
    """
    points = []
    for axis in axes:
        for value in values.get(axis, VALUES.get(axis, ())):
            base = start.replace(**{axis: value})
            points.append(Point(axis, f"{value:g}", "raincheck", base))
        if axis in RIVALS:
            points.append(Point(axis, "raincheck", "raincheck", start))
            points.append(Point(axis, RIVALS[axis], RIVALS[axis], start))
    return points


def run_sweep(sweep: Sweep, out: Path, processes: int = 1) -> list[Row]:
    """Measure what the file does not hold yet.

    Args:
        sweep: What to measure.
        out: A file of rows; created, or added to. A file of `bench quality` serves as well.
        processes: How many processes share the work.

    Returns:
        All rows that the sweep asks for.
    """
    return collect(sweep, out, processes)


def report_sweep(sweep: Sweep, out: Path, processes: int = 1) -> list[Row]:
    """`run_sweep`, with tables on the terminal and figures in a file beside the rows."""
    start = time.monotonic()
    print(f"sweep over {', '.join(sweep.axes)}; {describe(sweep.settings, processes)}")
    rows = run_sweep(sweep, out, processes)
    print(f"\n{texts(sweep_tables(sweep.points(), rows))}\n")
    print(f"{time.monotonic() - start:.0f} s; rows: {out}")
    print(f"written: {write_figures(summarise(rows), out.with_suffix('.sweep.json'))}")
    return rows


def sweep_tables(points: Sequence[Point], rows: Sequence[Row]) -> list[Table]:
    """A table for each task, model, selector and axis.

    Args:
        points: Which to show; those without rows are left out.
        rows: Of a sweep, or of any quality measurement.
    """
    tables = []
    whole = [line for line in summarise(rows) if line.dialogues == ALL]
    wanted = dict.fromkeys((point.axis, point.base.selector) for point in points)
    for task, model in dict.fromkeys((line.task, line.model) for line in whole):
        own = [line for line in whole if (line.task, line.model) == (task, model)]
        seen = [row for row in rows if (row["task"], row["model"]) == (task, model)]
        for axis, selector in wanted:
            some = [
                point for point in points if (point.axis, point.base.selector) == (axis, selector)
            ]
            found = {point: cells for point in some if (cells := _cells(point, own, seen))}
            compared = axis not in RIVALS or RIVALS[axis] in {point.way for point in found}
            if len(found) > 1 and compared:
                body = list(found.values())
                boards = f"{len({row['board'] for row in seen})} boards"
                title = f"{axis}: {task}, {model}, {selector}, {boards}"
                tables.append(Table(title, _head(axis, len(own[0].by_turn)), body, left=1))
    return tables


def _head(axis: str, turns: int) -> list[str]:
    later = ["turns 2+", "recovery", "recovery, all turns"] if turns > 1 else []
    return [axis, "full", "hard", "turn 1", "recovery", *later, "visible in turn 1", "in the guard"]


def _cells(point: Point, lines: Iterable[Line], rows: Iterable[Row]) -> list[str]:
    """A table's row; empty where the point means nothing on the model."""
    spans = {line.span: line for line in lines if line.point == point.key}
    if not spans:
        return []
    first = spans["turn 1"]
    cells = [
        point.value, f"{first.full:.3f}", f"{first.hard:.3f}", f"{first.accuracy.point:.3f}",
        interval(first.recovery),
    ]  # fmt: skip
    if "turns 2+" in spans:
        later = spans["turns 2+"]
        cells += [f"{later.accuracy.point:.3f}", interval(later.recovery)]
        cells.append(interval(spans["all turns"].recovery))
    visible = [shares(row).mean() for row in rows if point_of(row) == point.key]
    return [*cells, f"{sum(visible) / len(visible):.3f}", str(first.ended_in_guard)]
