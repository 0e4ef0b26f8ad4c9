"""`raincheck-hf bench selectors`: time, agreement with twins, accuracy, overlap, pictures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from raincheck_hf.bench import checkpoints
from raincheck_hf.bench.environment import provenance
from raincheck_hf.bench.quality import run_quality
from raincheck_hf.bench.selectors_agreement import check_cores
from raincheck_hf.bench.selectors_inputs import grid_of
from raincheck_hf.bench.selectors_overlap import measure_overlap
from raincheck_hf.bench.selectors_pictures import draw_selections
from raincheck_hf.bench.selectors_speed import measure_report, measure_speed
from raincheck_hf.bench.settings import Settings
from raincheck_hf.bench.tables import quality_tables, render
from raincheck_hf.selection import get_selector, list_selectors

PARTS = ("speed", "report", "overlap", "accuracy", "pictures")
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        parts: of `PARTS`.
        selectors: registered names; empty for all.
        sizes: tokens of the timed inputs, powers of 4.
        models: small models' names, or paths, for everything but speed.
        retention: fraction of tokens selected.
        boards: for accuracy and overlap.
        runs: timed runs of a selection.
        device: where to run.
        dtype: of the timed inputs.
        pictures: folder for pictures.
    """

    parts: tuple[str, ...] = PARTS
    selectors: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (256, 1024)
    models: tuple[str, ...] = ("qwen3_vl", "qwen3_5")
    retention: float = 0.3
    boards: int = 20
    runs: int = 9
    device: str = "cpu"
    dtype: str = "float32"
    pictures: Path = Path("out")

    def __post_init__(self) -> None:
        """Refuse before anything runs.

        Raises:
            ValueError: names what is wrong and what is allowed.
        """
        if unknown := sorted(set(self.parts) - set(PARTS)):
            raise ValueError(f"unknown part(s) {', '.join(unknown)}; known: {', '.join(PARTS)}")
        for selector in self.selectors:
            get_selector(selector)
        for size in self.sizes:
            grid_of(size, video=False)
        checkpoints.check_device(self.device)
        if not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype {self.dtype!r} is unknown; use float32, bfloat16 or float16")
        if self.boards < 1 or self.runs < 1 or not 0 < self.retention <= 1:
            raise ValueError("boards and runs must be 1 or more, and retention in (0, 1]")
        self.quality()

    @property
    def names(self) -> tuple[str, ...]:
        """The selectors."""
        return self.selectors or tuple(list_selectors())

    def quality(self) -> Settings:
        """The settings of the accuracy part: cells, hard and raincheck."""
        return Settings(
            models=self.models,
            selectors=self.names,
            boards=self.boards,
            reads=0,
            retention=self.retention,
            device=self.device,
            only=("hard", "raincheck"),
        )

    def labels(self) -> Iterator[Row]:
        """The rows of the parts that this file keeps, as far as they are known beforehand."""
        common = {"device": self.device.partition(":")[0], "retention": self.retention}
        if "speed" in self.parts:
            for tokens in self.sizes:
                for name in self.names:
                    yield {
                        "part": "speed", **common, "selector": name, "tokens": tokens,
                        "dtype": self.dtype, "runs": self.runs,
                    }  # fmt: skip
        for model in self.models:
            weights = {"model": model, "weights": checkpoints.fingerprint(model)}
            if "report" in self.parts:
                yield {"part": "report", **common, **weights}
            if "overlap" in self.parts:
                for name in self.names:
                    yield {
                        "part": "overlap", **common, **weights, "selector": name,
                        "boards": self.boards,
                    }  # fmt: skip


def run_selectors(plan: Plan, out: Path) -> list[Row]:
    """Measure what the file does not hold yet.

    Args:
        plan: what to measure.
        out: JSON Lines; created, or added to. Accuracy has a file of its own beside it.

    Returns:
        The rows that the plan asks for, in its order.

    Raises:
        RuntimeError: a kernel and its twin do not agree; nothing is reported then.
    """
    have = _read(out)
    todo = [label for label in plan.labels() if _key(label) not in have]
    if any(label["part"] == "speed" for label in todo):
        count = check_cores(plan.device, largest=min(1024, max(plan.sizes)))
        print(f"{count} comparisons of greedy cores with their plain loops agree")
    origin = provenance(plan.device)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        if out.stat().st_size and not out.read_bytes().endswith(b"\n"):
            file.write("\n")  # a line cut short when a run was stopped
        for label in todo:
            row = {**label, **_measure(plan, label), **origin}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            have[_key(label)] = row
    return [have[_key(label)] for label in plan.labels()]


def report_selectors(plan: Plan, out: Path) -> list[Row]:
    """`run_selectors`, with tables on the terminal, and the parts that keep files of their own."""
    rows = run_selectors(plan, out)
    for part, draw in TABLES.items():
        own = [row for row in rows if row["part"] == part]
        if own:
            print(f"\n{part}, {own[0]['machine']}\n{draw(own)}")
    if "accuracy" in plan.parts:
        lines = run_quality(plan.quality(), out.with_suffix(".quality.jsonl"))
        print(f"\n{quality_tables(lines)}")
    if "pictures" in plan.parts:
        for path in draw_selections(replace(plan, selectors=plan.names), plan.pictures):
            print(f"written: {path}")
    print(f"\nrows: {out}")
    return rows


def _measure(plan: Plan, label: Row) -> Row:
    if label["part"] == "speed":
        return measure_speed(
            label["selector"], label["tokens"], plan.retention, plan.device, plan.dtype, plan.runs
        )
    model, processor = checkpoints.load(label["model"], plan.device)
    if label["part"] == "report":
        return measure_report(model, processor, plan.device)
    return measure_overlap(
        model, processor, label["selector"], plan.retention, plan.boards, plan.device
    )


def _key(row: Row) -> str:
    fields = (
        "part", "device", "retention", "selector", "tokens", "dtype", "runs", "model", "weights",
        "boards",
    )  # fmt: skip
    return json.dumps([row.get(field) for field in fields])


def _read(path: Path) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            rows.setdefault(_key(row), row)
        except (ValueError, AttributeError):
            print(f"{path}: an unreadable line is left alone", file=sys.stderr)
    return rows


def _speed_table(rows: list[Row]) -> str:
    sizes = list(dict.fromkeys(row["tokens"] for row in rows))
    body = []
    for name in dict.fromkeys(row["selector"] for row in rows):
        own = {row["tokens"]: row for row in rows if row["selector"] == name}
        last = own[max(own)]
        agreement = ["-", "-", "-"]
        if "difference" in last:
            agreement = [
                f"{last['twin_ms']:.1f}", f"{last['difference']:.1e}", f"{last['same_picks']:.4f}"
            ]  # fmt: skip
        body.append([name, *(f"{own[size]['ms']['p50']:.2f}" for size in sizes), *agreement])
    heads = [f"{size} [ms]" for size in sizes]
    return render(["selector", *heads, "twin [ms]", "objective off by", "same picks"], body)


def _overlap_table(rows: list[Row]) -> str:
    body = [[row["model"], row["selector"], f"{100 * row['missing']:.1f} %"] for row in rows]
    return render(["model", "selector", "second's picks missing from the first's"], body)


def _report_table(rows: list[Row]) -> str:
    body = [[row["model"], "", f"{row['select_ms']}", f"{row['outside_ms']}"] for row in rows]
    return render(["model", "", "report.select_ms", "measured outside [ms]"], body)


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "speed": _speed_table,
    "report": _report_table,
    "overlap": _overlap_table,
}
