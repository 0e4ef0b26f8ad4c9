"""`raincheck-hf bench gaps`: how many follow-ups would wait for completion, and how long (§F.3).

A follow-up comes an interval after the answer before it. Until then completion restores what was
pending when the answer ended; if that takes longer than the interval, the follow-up waits.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raincheck_hf.bench import checkpoints
from raincheck_hf.bench.collect import open_rows
from raincheck_hf.bench.environment import provenance
from raincheck_hf.bench.rows import Row, key_of
from raincheck_hf.bench.settings import Size
from raincheck_hf.bench.stopwatch import spread
from raincheck_hf.bench.subjects import Subject, identity, load_subject
from raincheck_hf.bench.tables import Table
from raincheck_hf.config import RaincheckConfig
from raincheck_hf.selection.base import keep_count

KEY = (
    "bench", "model", "weights", "device", "dtype", "size", "seed", "given_rate", "intervals",
    "pending",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What to reckon.

    Attributes:
        intervals: The file, as `read_intervals` takes it.
        models: Whose completion to time: small models' names, folders, or keys of
            `random_weights.SIZES`.
        rate: Deferred tokens restored a second, instead of timing a model.
        pending: Deferred tokens left when the answer ended; empty for all that a model defers of
            the picture.
        size: Rows and columns of the picture, in tokens.
        retention: Fraction of them in the initial prefill.
        seed: Fixes the picture.
        device: Where to run.
        dtype: Of the parameters.
    """

    intervals: Path
    models: tuple[str, ...] = ("qwen3_vl", "qwen3_5")
    rate: float | None = None
    pending: tuple[int, ...] = ()
    size: Size = (12, 12)
    retention: float = 0.3
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse before anything runs.

        Raises:
            ValueError: Names what is wrong and what is allowed.
        """
        read_intervals(self.intervals)
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ValueError(f"the rate must be above 0 tokens a second; got {self.rate}")
        if any(tokens < 0 for tokens in self.pending):
            raise ValueError(f"pending tokens must be 0 or more; got {self.pending}")
        checkpoints.check_device(self.device)
        for model in self.models:
            identity(model)
        self.config()

    def config(self) -> RaincheckConfig:
        """What defers all of D, so that completion can be timed."""
        return RaincheckConfig(
            selector="uniform",
            retention=self.retention,
            defer="post_answer",
            completion="blocking",
        )

    @property
    def waiting(self) -> tuple[int, ...]:
        """Pending tokens, by how many of a picture are deferred if not given."""
        tokens = self.size[0] * self.size[1]
        return self.pending or (tokens - keep_count(self.retention, tokens),)


def read_intervals(path: Path) -> list[float]:
    """Seconds between the end of an answer and the next question.

    Args:
        path: One interval a line: a number, or a JSON object with `seconds`. Empty lines are left
            out.

    Raises:
        ValueError: The file cannot be read, has no interval, or a line is none; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the intervals at {str(path)!r} cannot be read: {error}") from error
    found = [_seconds(path, at, line) for at, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{path}: no intervals; write one a line, in seconds")
    return found


def _seconds(path: Path, at: int, line: str) -> float:
    try:
        value = json.loads(line)
        value = float(value["seconds"] if isinstance(value, dict) else value)
    except (ValueError, TypeError, KeyError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(
            f"{path}, line {at}: {line.strip()[:60]!r} is no interval; it is a number of seconds, "
            '0 or more, or {"seconds": 1.5}'
        )
    return value


def waits(intervals: Sequence[float], pending: int, tokens_per_second: float) -> dict[str, Any]:
    """What follow-ups would meet.

    Args:
        intervals: Seconds.
        pending: Deferred tokens left when the answer ended.
        tokens_per_second: Of completion, undisturbed.

    Returns:
        `follow_ups`; `completion_s`; `waiting`, how many wait; `share`; `wait_s`, `mean`, `p50`,
        `p95` and `max` over those that wait, None without any; `mean_s` over all follow-ups.

    Raises:
        ValueError: `pending` is negative, or the rate is not positive.
    """
    if pending < 0 or not 0 < tokens_per_second < math.inf:
        raise ValueError(
            f"pending must be 0 or more and the rate above 0; got {pending}, {tokens_per_second}"
        )
    left = np.maximum(0.0, pending / tokens_per_second - np.array(intervals, dtype=float))
    waiting = left[left > 0]
    return {
        "follow_ups": len(left),
        "completion_s": pending / tokens_per_second,
        "waiting": len(waiting),
        "share": len(waiting) / len(left),
        "mean_s": float(left.mean()),
        "wait_s": {
            "mean": float(waiting.mean()),
            "p50": float(np.median(waiting)),
            "p95": float(np.percentile(waiting, 95)),
            "max": float(waiting.max()),
        }
        if len(waiting)
        else None,
    }


def measure_rate(subject: Subject, plan: Plan, runs: int = 5) -> float:
    """The median rate at which a picture's deferred tokens are restored after an answer.

    Args:
        subject: The model.
        plan: The picture, and what is deferred of it.
        runs: Timed turns, after one that is not timed.

    Returns:
        Tokens a second.
    """
    inputs = subject.picture(plan.size, plan.seed)
    rates = []
    for _ in range(runs + 1):
        report = subject.model.generate(
            **inputs,
            raincheck=plan.config(),
            max_new_tokens=2,
            min_new_tokens=2,
            do_sample=False,
            return_dict_in_generate=True,
        ).raincheck
        rates.append(report.n_deferred / report.completion_ms * 1e3)
    return spread(rates[1:])["p50"]


def run_gaps(plan: Plan, out: Path) -> list[Row]:
    """Reckon what the file does not hold yet; a rate that it holds is not measured again.

    Args:
        plan: What to reckon.
        out: JSON Lines; created, or added to.

    Returns:
        A row for each model (or the given rate) and number of pending tokens; see `waits`.
    """
    file = open_rows(out, *KEY)
    intervals = read_intervals(plan.intervals)
    origin = provenance(plan.device)
    wanted = []
    for model in plan.models if plan.rate is None else (None,):
        labels = [_label(plan, model, intervals, tokens) for tokens in plan.waiting]
        keys = [key_of(label, KEY) for label in labels]
        wanted += keys
        todo = [label for label, key in zip(labels, keys, strict=True) if key not in file]
        if todo:
            rate = plan.rate
            if rate is None:
                subject = load_subject(str(model), plan.device, plan.dtype)
                rate = measure_rate(subject, plan)
            file.append(
                [
                    {**label, "rate": rate, **waits(intervals, label["pending"], rate), **origin}
                    for label in todo
                ]
            )
    return file.rows(wanted)


def report_gaps(plan: Plan, out: Path) -> list[Row]:
    """`run_gaps`, with a table on the terminal."""
    intervals = read_intervals(plan.intervals)
    low, middle, high = np.percentile(intervals, [20, 50, 80])
    print(
        f"{len(intervals)} intervals between turns from {plan.intervals}: median {middle:.3g} s, "
        f"20th to 80th percentile {low:.3g} to {high:.3g} s"
    )
    rows = run_gaps(plan, out)
    print(f"\n{gaps_table(rows).text()}\n\nrows: {out}")
    return rows


def _label(plan: Plan, model: str | None, intervals: Sequence[float], pending: int) -> Row:
    timed = model is not None
    digest = hashlib.sha256(json.dumps(list(intervals)).encode()).hexdigest()[:12]
    return {
        "bench": "gaps",
        "model": model,
        "weights": identity(model) if model is not None else None,
        "device": plan.device.partition(":")[0] if timed else None,
        "dtype": plan.dtype if timed else None,
        "size": list(plan.size) if timed else None,
        "seed": plan.seed if timed else None,
        "given_rate": plan.rate,
        "intervals": digest,
        "pending": pending,
    }


def gaps_table(rows: Sequence[Row]) -> Table:
    """One line for each model, or given rate, and number of pending tokens."""
    body = []
    for row in rows:
        wait = row["wait_s"] or {}
        waited = [f"{wait[name]:.3g}" if wait else "-" for name in ("mean", "p95", "max")]
        body.append(
            [
                row["model"] or "given", f"{row['rate']:.0f}", str(row["pending"]),
                f"{row['completion_s']:.3g}", f"{row['waiting']} of {row['follow_ups']}",
                f"{100 * row['share']:.1f} %", *waited,
            ]
        )  # fmt: skip
    head = [
        "model", "tokens/s", "pending", "completion [s]", "would wait", "share",
        "mean wait [s]", "p95", "longest",
    ]  # fmt: skip
    return Table(f"follow-ups that would wait, {rows[0]['machine']}", head, body, left=1)
