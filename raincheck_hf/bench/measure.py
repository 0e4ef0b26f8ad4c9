"""One board on one model, in every way that was asked for."""

from __future__ import annotations

from typing import Any

from raincheck_hf.bench.dialogue import Answered, Asked, Script
from raincheck_hf.bench.rows import Row
from raincheck_hf.bench.settings import Job, Settings
from raincheck_hf.bench.tasks import Exam, make_exam, marks


def measure(
    model: Any, processor: Any, settings: Settings, job: Job, labels: list[dict[str, Any]]
) -> list[Row]:
    """Measure rows of a job.

    Args:
        model: Enabled.
        processor: Its processor.
        settings: Of the measurement.
        job: The board.
        labels: Which rows to measure, as `Settings.labels` makes them.

    Returns:
        The labels with the results: `asked`, `truth` and `said` by turn; `right`, 0 or 1 by turn
        and position; `n_visual`; `selected`, counted from the prompt's first visual token, and
        `restored_per_step`, both of the first turn.

    Raises:
        RuntimeError: Two ways were not given the same selection.
    """
    task = job.task
    exam = make_exam(task.name, task.size, task.turns, settings.seed, job.board)
    script = Script(processor, exam.board.image(), exam.asked, settings.device)
    rows = []
    for label in labels:
        base = settings.config(label["selector"] or "uniform", exam.draw)
        answers = script.run(model, label["way"], base)
        rows.append({**label, **_result(exam, answers)})
    _check_selections(rows)
    return rows


def _result(exam: Exam, answers: list[Answered]) -> dict[str, Any]:
    pairs: list[tuple[Asked, Answered]] = list(zip(exam.asked, answers, strict=True))
    report = answers[0].report
    every = sorted([*report.selected.tolist(), *report.deferred.tolist()])
    return {
        "asked": [ask.question for ask, _ in pairs],
        "truth": [ask.truth for ask, _ in pairs],
        "said": [answer.said for _, answer in pairs],
        "right": [marks(answer.said, ask.truth) for ask, answer in pairs],
        "n_visual": report.n_visual,
        # One picture, so its tokens follow each other.
        "selected": [at - every[0] for at in report.selected.tolist()],
        "restored_per_step": _without_trailing_zeros(report.restored_per_step),
    }


def _without_trailing_zeros(steps: list[int]) -> list[int]:
    last = max((at for at, count in enumerate(steps, 1) if count), default=0)
    return steps[:last]


def _check_selections(rows: list[Row]) -> None:
    """Hard and raincheck are compared on the same selection or not at all."""
    seen: dict[str, list[int]] = {}
    for row in rows:
        if row["way"] == "full":
            continue
        if seen.setdefault(row["selector"], row["selected"]) != row["selected"]:
            raise RuntimeError(
                f"selector {row['selector']!r} chose other tokens for {row['way']!r} than before "
                f"on board {row['board']}; it is not deterministic, and ways cannot be compared"
            )
