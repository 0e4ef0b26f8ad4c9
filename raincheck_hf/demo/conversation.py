"""One conversation, held by raincheck and by hard pruning, beside the truth."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raincheck_hf.bench.dialogue import Answered, Asked, Script
from raincheck_hf.bench.tasks import marks
from raincheck_hf.config import RaincheckConfig
from raincheck_hf.report import RaincheckReport
from raincheck_hf.tiny.boards import QA, Board, make_board

_WIDTH = 64


@dataclass(frozen=True)
class Held:
    """A conversation that was held.

    Attributes:
        board: What it was about.
        asked: The questions.
        said: The answers' texts, by way.
        report: Of raincheck's first turn.
        selected: int64 [n], cells in the first prefill, counted in reading order.
        deferred: int64 [m], the others, in the order of restoration.
    """

    board: Board
    asked: tuple[Asked, ...]
    said: dict[str, list[str]]
    report: RaincheckReport
    selected: np.ndarray
    deferred: np.ndarray

    def restored_after(self, step: int) -> int:
        """How many deferred cells are restored once the pass that consumes y_step is done."""
        return sum(self.report.restored_per_step[:step])


def hold(
    model: Any, processor: Any, size: tuple[int, int], config: RaincheckConfig, seed: int
) -> Held:
    """Have the board read, then ask for three cells that the first prefill did not hold.

    Args:
        model: An enabled model.
        processor: Its processor.
        size: Rows and columns of the board.
        config: What raincheck runs with.
        seed: Fixes board and questions.
    """
    rng = np.random.default_rng([seed, 8])
    board = make_board(*size, rng)
    first = _asked(board.ask_board())
    # One token tells what is selected, which depends on the turn's input alone.
    probe = Script(processor, board.image(), [replace(first, budget=1)], model.device)
    [seen] = probe.run(model, "hard", config)
    _, deferred = _cells(seen.report)
    missing = rng.choice(deferred, size=min(3, len(deferred)), replace=False)
    asked = (first, *(_asked(board.ask_cell(*divmod(int(at), size[1]))) for at in missing))
    script = Script(processor, board.image(), asked, model.device)
    answers: dict[str, list[Answered]] = {
        way: script.run(model, way, config) for way in ("hard", "raincheck")
    }
    report = answers["raincheck"][0].report
    said = {way: [answer.said for answer in some] for way, some in answers.items()}
    return Held(board, asked, said, report, *_cells(report))


def transcript(held: Held) -> str:
    """The conversation as text; wrong digits are marked below."""
    report = held.report
    lines = [
        f"{report.n_selected} of {report.n_visual} cells are in the first prefill; "
        f"{report.restored_in_answer} more come back during the first answer, "
        f"{report.n_deferred - report.restored_in_answer} after it."
    ]
    for turn, ask in enumerate(held.asked):
        lines += ["", f"user       {ask.question}", *_answer("truth", ask.truth)]
        for way, said in held.said.items():
            lines += _answer(way, said[turn], ask.truth)
    return "\n".join(lines)


def _answer(name: str, said: str, truth: str | None = None) -> Iterator[str]:
    """The lines of an answer, each with its marks."""
    wrong = "" if truth is None else "".join(" ^"[not right] for right in marks(said, truth))
    pieces = textwrap.wrap(said, _WIDTH) or [""]
    for at, piece in enumerate(pieces):
        yield f"{name if at == 0 else '':<9}  {piece}"
        below = wrong[at * _WIDTH : (at + 1) * _WIDTH]
        if below.strip():
            yield f"{'':<9}  {below}".rstrip()
    if truth is not None and len(truth) > 1:
        yield f"{'':<9}  {len(truth) - wrong.count('^')} of {len(truth)} right"


def _asked(qa: QA) -> Asked:
    return Asked(qa.question, qa.answer, len(qa.answer) + 1)


def _cells(report: RaincheckReport) -> tuple[np.ndarray, np.ndarray]:
    """Selected and deferred cells in reading order: one picture's tokens follow each other."""
    selected, deferred = report.selected.numpy(), report.deferred.numpy()
    start = min(selected.min(initial=1 << 62), deferred.min(initial=1 << 62))
    return selected - start, deferred - start
