"""One board on one model, in every way that was asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raincheck_hf.bench.dialogue import Answered, Asked, Script
from raincheck_hf.bench.rows import Row
from raincheck_hf.bench.settings import Job, Label, Measurement, config_from
from raincheck_hf.bench.tasks import Exam, make_exam, marks

_MATCHED = (
    "task", "model", "weights", "dtype", "device", "size", "turns", "seed", "board",
    "retention", "selector",
)  # fmt: skip
"""Rows that agree in these must have the same selection."""


def measure(
    model: Any, processor: Any, measurement: Measurement, job: Job, labels: list[Label]
) -> list[Row]:
    """Measure rows of a job.

    Args:
        model: Enabled.
        processor: Its processor.
        measurement: What they belong to.
        job: The board.
        labels: Which rows to measure, as `Settings.labels` makes them.

    Returns:
        The labels with the results: `asked`, `truth`, `said` and `answer_tokens` (generated, an
        end token included) by turn; `right`, 0 or 1 by turn and position; `n_visual`; `selected`,
        counted from the prompt's first visual token, and `restored_per_step`, both of the first
        turn.

    Raises:
        RuntimeError: Two ways were not given the same selection.
    """
    task = job.task
    exam = make_exam(task.name, task.size, task.turns, measurement.seed, job.board)
    script = Script(processor, exam.board.image(), exam.asked, measurement.device)
    rows = []
    for label in labels:
        answers = script.run(model, label["way"], config_from(label, exam.draw))
        rows.append({**label, **_result(exam, answers)})
    check_selections(rows)
    return rows


def _result(exam: Exam, answers: list[Answered]) -> dict[str, Any]:
    pairs: list[tuple[Asked, Answered]] = list(zip(exam.asked, answers, strict=True))
    report = answers[0].report
    every = sorted([*report.selected.tolist(), *report.deferred.tolist()])
    return {
        "asked": [ask.question for ask, _ in pairs],
        "truth": [ask.truth for ask, _ in pairs],
        "said": [answer.said for _, answer in pairs],
        "answer_tokens": [answer.tokens for answer in answers],
        "right": [marks(answer.said, ask.truth) for ask, answer in pairs],
        "n_visual": report.n_visual,
        # One picture, so its tokens follow each other.
        "selected": [at - every[0] for at in report.selected.tolist()],
        "restored_per_step": _without_trailing_zeros(report.restored_per_step),
    }


def _without_trailing_zeros(steps: list[int]) -> list[int]:
    last = max((at for at, count in enumerate(steps, 1) if count), default=0)
    return steps[:last]


def check_selections(rows: Iterable[Row]) -> None:
    """Hard, raincheck and its variants are compared on the same selection or not at all.

    Args:
        rows: With any models, boards and ways among them.

    Raises:
        RuntimeError: Two ways were not given the same selection.
    """
    seen: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        place = tuple(str(row[field]) for field in _MATCHED)
        if seen.setdefault(place, row["selected"]) != row["selected"]:
            raise RuntimeError(
                f"selector {row['selector']!r} chose other tokens for {row['way']!r} than for "
                f"another way on board {row['board']}; ways cannot be compared"
            )
