"""`raincheck-hf bench quality`: full, hard and raincheck with matched selections."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tqdm import tqdm

from raincheck_hf.bench import workers
from raincheck_hf.bench.environment import provenance
from raincheck_hf.bench.plots import plot_positions
from raincheck_hf.bench.rows import RowFile, key_of
from raincheck_hf.bench.settings import Settings
from raincheck_hf.bench.summary import Line, summarise
from raincheck_hf.bench.tables import quality_tables


def run_quality(settings: Settings, out: Path, processes: int = 1) -> list[Line]:
    """Measure what the file does not hold yet, and sum up all that the settings ask for.

    Args:
        settings: Of the measurement.
        out: A file of rows; created, or added to.
        processes: How many processes share the work.

    Returns:
        The figures.
    """
    file = RowFile(out)
    if file.unreadable:
        print(f"{out}: {file.unreadable} unreadable line(s) left alone", file=sys.stderr)
    origin = provenance(settings.device)
    jobs = [(job, settings.labels(job)) for job in settings.jobs()]
    missing = [
        (job, [label for label in labels if key_of(label) not in file]) for job, labels in jobs
    ]
    todo = [(job, labels) for job, labels in missing if labels]
    count = sum(len(labels) for _, labels in todo)
    wanted = [key_of(label) for _, labels in jobs for label in labels]
    print(f"{len(wanted)} conversations, {len(wanted) - count} of them already in {out}")
    with tqdm(total=count, unit="conversation", disable=None, smoothing=0.05) as bar:
        for rows in workers.run(settings, todo, processes):
            file.append([{**row, **origin} for row in rows])
            bar.update(len(rows))
    rows = file.rows(wanted)
    commits = {f"{row['versions']} {row['commit']}" for row in rows}
    if len(commits) > 1:
        print(
            f"note: these rows come from {len(commits)} versions of the software", file=sys.stderr
        )
    return summarise(rows)


def report_quality(settings: Settings, out: Path, processes: int = 1) -> list[Line]:
    """`run_quality`, with tables on the terminal and figures in files beside the rows."""
    start = time.monotonic()
    _announce(settings, processes)
    lines = run_quality(settings, out, processes)
    print(f"\n{quality_tables(lines)}\n")
    print(f"{time.monotonic() - start:.0f} s; rows: {out}")
    for path in write_figures(lines, settings.guard_tokens, out):
        print(f"written: {path}")
    return lines


def write_figures(lines: list[Line], guard: int, out: Path) -> list[Path]:
    """Write the figures, and the picture by position where whole boards were read.

    Returns:
        The files: `NAME.summary.json`, `NAME.positions.png`.
    """
    summary = out.with_suffix(".summary.json")
    summary.write_text(
        json.dumps([line.to_dict() for line in lines], indent=1) + "\n", encoding="utf-8"
    )
    written = [summary]
    reads = [line for line in lines if line.task == "reading" and line.span == "turn 1"]
    if reads:
        picture = out.with_suffix(".positions.png")
        try:
            plot_positions(reads, guard, picture)
            written.append(picture)
        except ImportError:
            print(
                "no picture by position: matplotlib is missing (pip install 'raincheck_hf[demo]')"
            )
    return written


def _announce(settings: Settings, processes: int) -> None:
    print(
        f"quality on held-out boards, seed {settings.seed}, retention {settings.retention}, "
        f"chunk {settings.chunk_size}, guard {settings.guard_tokens}, "
        f"{settings.device} {settings.dtype}, {processes} process(es)"
    )
    for task in settings.tasks:
        size = "×".join(map(str, task.size))
        print(f"  {task.name}: {task.boards} boards of {size}, {task.turns} question(s) each")
