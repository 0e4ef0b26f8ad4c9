"""What is asked of held-out boards; a seed and a number fix a board and its questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from raincheck_hf.bench.dialogue import Asked
from raincheck_hf.tiny.boards import QA, Board, make_board


@dataclass(frozen=True)
class Exam:
    """One board and the conversation about it.

    Attributes:
        board: Held-out handwriting.
        asked: One question a turn.
        draw: Seed for selectors that draw, another one on each board.
    """

    board: Board
    asked: tuple[Asked, ...]
    draw: int


def cells(board: Board, turns: int, rng: np.random.Generator) -> list[QA]:
    """Several cells, none of them twice, one a turn."""
    rows, cols = board.shape
    chosen = rng.choice(rows * cols, size=turns, replace=False)
    return [board.ask_cell(*divmod(int(cell), cols)) for cell in chosen]


def reading(board: Board, turns: int, rng: np.random.Generator) -> list[QA]:
    """The whole board in reading order, in the first turn; cells in further ones."""
    return [board.ask_board(), *cells(board, turns - 1, rng)]


TASKS: Mapping[str, Callable[[Board, int, np.random.Generator], list[QA]]] = {
    "cells": cells,
    "reading": reading,
}


def make_exam(task: str, size: tuple[int, int], turns: int, seed: int, number: int) -> Exam:
    """Draw a board and its questions.

    Args:
        task: A key of `TASKS`.
        size: Rows and columns.
        turns: How many questions.
        seed: Of the measurement.
        number: Of the board within it.
    """
    rng = np.random.default_rng([seed, list(TASKS).index(task), number])
    board = make_board(*size, rng)
    asked = [
        Asked(qa.question, qa.answer, len(qa.answer) + 1) for qa in TASKS[task](board, turns, rng)
    ]
    return Exam(board, tuple(asked), int(rng.integers(2**31)))


def marks(said: str, truth: str) -> list[int]:
    """1 for each position of the truth that the answer has right; what is missing is wrong."""
    return [int(said[at : at + 1] == digit) for at, digit in enumerate(truth)]
