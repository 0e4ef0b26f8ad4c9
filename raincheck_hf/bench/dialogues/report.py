"""`raincheck-hf bench dialogues`: runs, tells how far it is, and prints the figures."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from raincheck_hf.bench.dialogues.plan import KEY, Plan
from raincheck_hf.bench.dialogues.runner import Runner, labels
from raincheck_hf.bench.dialogues.summary import Line, summarise, table, waiting
from raincheck_hf.bench.environment import provenance
from raincheck_hf.bench.rows import Row, RowFile, key_of


def report_dialogues(plan: Plan, model: Any, processor: Any, out: Path) -> list[Line]:
    """Run what a file of rows does not hold yet; print a table over all of the plan.

    Args:
        plan: What to run.
        model: Enabled.
        processor: Its processor.
        out: The file of rows; created, or added to. `NAME.summary.json` gets the figures.

    Returns:
        The figures.
    """
    file = open_rows(out)
    wanted = [
        key_of(about, KEY)
        for dialogue in plan.dialogues
        for run in plan.runs()
        for about in labels(dialogue, run)
    ]
    there = sum(key in file for key in wanted)
    print(f"{len(plan.dialogues)} dialogues, {len(wanted)} turns, {there} of them already in {out}")
    start = time.monotonic()
    with tqdm(total=len(wanted), unit="turn", disable=None, smoothing=0.05) as bar:
        origin = provenance(plan.device)
        Runner(plan, model, processor, file, origin, lambda: bar.update(1)).run()
    lines = report_rows(file.rows(wanted), out)
    print(f"{time.monotonic() - start:.0f} s; rows: {out}")
    return lines


def report_rows(rows: Iterable[Row], out: Path) -> list[Line]:
    """Print a table of rows, and write its figures to `NAME.summary.json` beside a file."""
    rows = list(rows)
    lines = summarise(rows)
    print(f"\n{table(lines)}\n" if lines else "\nno dialogue is answered and scored as a whole\n")
    if left := waiting(rows):
        print(f"{left} answers wait for a judge: raincheck-hf bench judge --rows FILE --url URL")
    if len({(json.dumps(row["versions"]), row["commit"]) for row in rows}) > 1:
        print("note: these rows come from several versions of the software", file=sys.stderr)
    summary = out.with_suffix(".summary.json")
    plain = [line.to_dict() for line in lines]
    summary.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    return lines


def open_rows(path: Path) -> RowFile:
    """A file of answers; says so if some of its lines are none."""
    file = RowFile(path, KEY)
    if file.unreadable:
        print(f"{path}: {file.unreadable} unreadable line(s) left alone", file=sys.stderr)
    return file
