"""From a measurement to its rows: what a file holds already is not measured again."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

from raincheck_hf.bench import workers
from raincheck_hf.bench.environment import provenance
from raincheck_hf.bench.measure import check_selections
from raincheck_hf.bench.rows import Row, RowFile, key_of
from raincheck_hf.bench.settings import Job, Label, Measurement


def open_rows(path: Path, *fields: str) -> RowFile:
    """A file of rows, with a note about lines that are none.

    Args:
        path: The file; it may be missing.
        *fields: As `RowFile` takes them; none for those of `rows.KEY`.
    """
    file = RowFile(path, fields) if fields else RowFile(path)
    if file.unreadable:
        print(f"{path}: {file.unreadable} unreadable line(s) left alone", file=sys.stderr)
    return file


def collect(measurement: Measurement, out: Path, processes: int = 1) -> list[Row]:
    """Measure what the file does not hold yet.

    Args:
        measurement: What to measure.
        out: A file of rows; created, or added to.
        processes: How many processes share the work.

    Returns:
        All rows that the measurement asks for, in its order.

    Raises:
        RuntimeError: Two ways that are compared were not given the same selection.
    """
    file = open_rows(out)
    origin = provenance(measurement.device)
    jobs = [(job, measurement.labels(job)) for job in measurement.jobs()]
    wanted = [key_of(label) for _, labels in jobs for label in labels]
    todo = _pieces(
        (job, [label for label in labels if key_of(label) not in file]) for job, labels in jobs
    )
    count = sum(len(labels) for _, labels in todo)
    print(f"{len(wanted)} conversations, {len(wanted) - count} of them already in {out}")
    with tqdm(total=count, unit="conversation", disable=None, smoothing=0.05) as bar:
        for rows in workers.run(measurement, todo, processes):
            file.append([{"bench": "quality", **row, **origin} for row in rows])
            bar.update(len(rows))
    rows = file.rows(wanted)
    check_selections(rows)
    note_origins(rows)
    return rows


def note_origins(rows: Iterable[Row]) -> None:
    """Say so where rows were not all made by the same software."""
    origins = {f"{row['versions']} {row['commit']}" for row in rows}
    if len(origins) > 1:
        print(
            f"note: these rows come from {len(origins)} versions of the software", file=sys.stderr
        )


def _pieces(work: Iterable[workers.Work]) -> list[workers.Work]:
    """Jobs cut by selector, long answers first, so that processes end at about the same time."""

    def selector(label: Label) -> str:
        return label["selector"] or ""

    pieces: list[tuple[Job, list[Label]]] = []
    for job, labels in work:
        ordered = sorted(labels, key=selector)
        pieces += [(job, list(own)) for _, own in itertools.groupby(ordered, key=selector)]
    return sorted(pieces, key=lambda piece: -piece[0].task.first_answer)
