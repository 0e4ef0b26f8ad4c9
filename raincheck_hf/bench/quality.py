"""`raincheck-hf bench quality`: full, hard and raincheck with matched selections."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from raincheck_hf.bench.collect import collect
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
    return summarise(collect(settings, out, processes))


def report_quality(settings: Settings, out: Path, processes: int = 1) -> list[Line]:
    """`run_quality`, with tables on the terminal and figures in a file beside the rows."""
    start = time.monotonic()
    print(f"quality on held-out boards, {describe(settings, processes)}")
    for task in settings.tasks:
        size = "×".join(map(str, task.size))
        print(f"  {task.name}: {task.boards} boards of {size}, {task.turns} question(s) each")
    lines = run_quality(settings, out, processes)
    print(f"\n{quality_tables(lines)}\n")
    print(f"{time.monotonic() - start:.0f} s; rows: {out}")
    print(f"written: {write_figures(lines, out.with_suffix('.summary.json'))}")
    print(f"pictures: raincheck-hf plot {out}")
    return lines


def write_figures(lines: Sequence[Line], path: Path) -> Path:
    """Write the figures as JSON; returns the path."""
    text = json.dumps([line.to_dict() for line in lines], indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def describe(settings: Settings, processes: int) -> str:
    """What all rows of a measurement have in common, for people."""
    return (
        f"seed {settings.seed}, retention {settings.retention}, chunk {settings.chunk_size}, "
        f"guard {settings.guard_tokens}, {settings.device} {settings.dtype}, "
        f"{processes} process(es)"
    )
