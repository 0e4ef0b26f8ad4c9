"""Dialogues about held-out boards, the same that `raincheck-hf bench quality` holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from raincheck_hf.bench.dialogues.converters.media import Store
from raincheck_hf.bench.dialogues.format import Dialogue, Turn
from raincheck_hf.bench.tasks import TASKS, Exam, make_exam


def board_dialogues(
    out: Path,
    boards: int,
    turns: int = 4,
    size: tuple[int, int] = (8, 8),
    task: str = "cells",
    seed: int = 0,
) -> Iterator[Dialogue]:
    """Draw boards, write their pictures and ask about them.

    Args:
        out: The data file to be; pictures go to a folder beside it.
        boards: How many.
        turns: Questions a board, one a turn.
        size: Rows and columns of a board.
        task: A key of `tasks.TASKS`.
        seed: Fixes boards and questions.

    Raises:
        ValueError: There is no such task, or a board has too few cells for that many turns.
    """
    if task not in TASKS:
        raise ValueError(f"task {task!r} is unknown; known are {', '.join(TASKS)}")
    most = size[0] * size[1] + (task == "reading")
    if not 1 <= turns <= most:
        raise ValueError(f"turns must be 1 to {most} on such boards; got {turns}")
    store = Store(out)
    for number in range(boards):
        exam = make_exam(task, size, turns, seed, number)
        picture = store.picture(f"board-{number:05}", exam.board.image())
        yield _dialogue(f"{task}-{size[0]}x{size[1]}-{seed}-{number}", picture, exam)


def _dialogue(name: str, picture: str, exam: Exam) -> Dialogue:
    turns = [
        Turn(
            question=ask.question,
            images=() if at else (picture,),
            reference=ask.truth,
            scoring="positions",
            max_new_tokens=ask.budget,
        )
        for at, ask in enumerate(exam.asked)
    ]
    return Dialogue(id=name, turns=tuple(turns), seed=exam.draw)
