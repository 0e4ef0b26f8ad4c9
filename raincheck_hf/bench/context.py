"""`raincheck-hf bench context`: what an answer could see, by initial retention (§D.2)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raincheck_hf.bench.availability import nothing_rode, shares
from raincheck_hf.bench.quality import describe
from raincheck_hf.bench.rows import Row
from raincheck_hf.bench.summary import POINT, point_of
from raincheck_hf.bench.sweep import Sweep, run_sweep
from raincheck_hf.bench.tables import Table


@dataclass(frozen=True)
class Seen:
    """What the first answers of one way of running could see.

    Attributes:
        task: The task.
        model: The model.
        point: The fields of `summary.POINT`.
        boards: How many answers.
        tokens: Their mean length, end tokens included.
        initial: Mean share of visual tokens in the initial prefill.
        mean: Share of visual tokens available, mean over each answer's tokens, then over answers.
        last: Share that the last token could see, mean over answers.
        in_guard: Answers that ended in the guard.
    """

    task: str
    model: str
    point: tuple[Any, ...]
    boards: int
    tokens: float
    initial: float
    mean: float
    last: float
    in_guard: int

    @property
    def fields(self) -> dict[str, Any]:
        """The point's fields by name."""
        return dict(zip(POINT, self.point, strict=True))


def seen(rows: Sequence[Row]) -> list[Seen]:
    """From the rows of a quality measurement, in the order in which they first come."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["model"], point_of(row)), []).append(row)
    found = []
    for (task, model, point), own in groups.items():
        available = [shares(row) for row in own]
        found.append(
            Seen(
                task,
                model,
                point,
                boards=len(own),
                tokens=float(np.mean([len(some) for some in available])),
                initial=float(np.mean([len(row["selected"]) / row["n_visual"] for row in own])),
                mean=float(np.mean([some.mean() for some in available])),
                last=float(np.mean([some[-1] for some in available])),
                in_guard=sum(map(nothing_rode, own)),
            )
        )
    return found


def report_context(sweep: Sweep, out: Path, processes: int = 1) -> list[Seen]:
    """Measure what the file does not hold yet, and show what raincheck's first answers could see.

    Args:
        sweep: Along retention.
        out: A file of rows; created, or added to. A file of `bench sweep` serves as well.
        processes: How many processes share the work.
    """
    start = time.monotonic()
    print(f"context of first answers; {describe(sweep.settings, processes)}")
    rows = run_sweep(sweep, out, processes)
    found = seen(rows)
    print(f"\n{context_table(found).text()}\n\n{time.monotonic() - start:.0f} s; rows: {out}")
    return found


def context_table(found: Sequence[Seen]) -> Table:
    """One line for each task, model, selector and retention."""
    body = [
        [
            one.task, one.model, str(one.fields["selector"]), f"{one.fields['retention']:g}",
            f"{one.tokens:.0f}", f"{one.initial:.3f}", f"{one.mean:.3f}", f"{one.last:.3f}",
            f"{one.in_guard} of {one.boards}",
        ]
        for one in found
    ]  # fmt: skip
    head = [
        "task", "model", "selector", "retention", "answer tokens", "visible at first",
        "mean over the answer", "at its end", "ended in the guard",
    ]  # fmt: skip
    return Table("visual tokens available to first answers", head, body, left=3)
