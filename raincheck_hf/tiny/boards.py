"""Boards of real handwriting, and the questions that can be asked about them.

A board has R rows and C columns of handwritten digits, 32 × 32 pixels a cell, so that one cell is
one merged visual token. Cells are named like a chess board's: a column letter from A, then a row
number from 1 at the top. Everything that is drawn comes from the generator handed in, so a seed
fixes it. See DIGITS.md for the origin of the handwriting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image

CELL = 32
"""Pixels a cell measures, in height and in width."""
MAX_SIDE = 24
"""Rows or columns of the largest board that the tokenizer has names for."""
FIRST_HELD_OUT = 1500
"""Pictures from this index on are never trained on."""

Split = Literal["train", "held_out"]


class QA(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """The pictures, uint8 [N, 8, 8] with values 0 to 16, and their digits, int64 [N]."""
    with np.load(Path(__file__).with_name("digits.npz")) as archive:
        return archive["images"], archive["labels"].astype(np.int64)


@cache
def enlarged() -> np.ndarray:
    """The pictures as cells: uint8 [N, 32, 32], white on black, enlarged bilinearly."""
    grey = np.rint(digits()[0] * (255 / 16)).astype(np.uint8)
    size, how = (CELL, CELL), Image.Resampling.BILINEAR
    return np.stack([np.asarray(Image.fromarray(one).resize(size, how)) for one in grey])


def column_letter(col: int) -> str:
    """The letter of a column counted from 0."""
    if not 0 <= col < MAX_SIDE:
        raise ValueError(f"column {col} has no letter; columns run from 0 to {MAX_SIDE - 1}")
    return chr(ord("A") + col)


def address(row: int, col: int) -> str:
    """The name of a cell, its row and column counted from 0: `address(4, 3)` is `D5`."""
    return f"{column_letter(col)}{row + 1}"


def cell_question(row: int, col: int, of: str = "") -> str:
    """`What is in D5?`, or with `of="board 2"`, `What is in D5 of board 2?`"""
    return f"What is in {address(row, col)}{of and ' of ' + of}?"


def row_question(row: int) -> str:
    """`Read row 3.`"""
    return f"Read row {row + 1}."


def column_question(col: int) -> str:
    """`Read column D.`"""
    return f"Read column {column_letter(col)}."


BOARD_QUESTION = "Read the board."


@dataclass(frozen=True, eq=False)
class Board:
    """R × C handwritten digits.

    Attributes:
        index: int64 [R, C], which of the pictures stands in each cell.
    """

    index: np.ndarray

    @property
    def labels(self) -> np.ndarray:
        """The digit in each cell, int64 [R, C]."""
        return digits()[1][self.index]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.index.shape

    def pixels(self) -> np.ndarray:
        """The picture in grey, uint8 [32·R, 32·C]."""
        rows, cols = self.shape
        return enlarged()[self.index].swapaxes(1, 2).reshape(rows * CELL, cols * CELL)

    def image(self) -> Image.Image:
        """The picture as RGB, 32·R pixels high and 32·C wide."""
        return Image.fromarray(self.pixels()).convert("RGB")

    def ask_cell(self, row: int, col: int, of: str = "") -> QA:
        """Ask for one digit; `of` names the board or frame where there are several."""
        return QA(cell_question(row, col, of), str(self.labels[row, col]))

    def ask_row(self, row: int) -> QA:
        """Ask for a row, left to right."""
        return QA(row_question(row), _join(self.labels[row]))

    def ask_column(self, col: int) -> QA:
        """Ask for a column, top to bottom."""
        return QA(column_question(col), _join(self.labels[:, col]))

    def ask_board(self) -> QA:
        """Ask for every digit in reading order."""
        return QA(BOARD_QUESTION, _join(self.labels.ravel()))

    def ask_random_cell(self, rng: np.random.Generator, of: str = "") -> QA:
        """Ask for a cell drawn from `rng`."""
        rows, cols = self.shape
        return self.ask_cell(int(rng.integers(rows)), int(rng.integers(cols)), of)


def make_board(
    rows: int, cols: int, rng: np.random.Generator | int, split: Split = "held_out"
) -> Board:
    """Draw a board.

    Args:
        rows: R, 1 to 24.
        cols: C, 1 to 24.
        rng: a generator, or a seed for one.
        split: `"train"` (pictures 0 to 1,499) or `"held_out"` (1,500 to 1,796).

    Raises:
        ValueError: the size or the split is not among those allowed.
    """
    if not (1 <= rows <= MAX_SIDE and 1 <= cols <= MAX_SIDE):
        raise ValueError(f"a board of {rows}×{cols} was asked for; each side is 1 to {MAX_SIDE}")
    pools = {"train": (0, FIRST_HELD_OUT), "held_out": (FIRST_HELD_OUT, len(digits()[1]))}
    if split not in pools:
        raise ValueError(f"split {split!r} is unknown; it is one of {', '.join(pools)}")
    return Board(np.random.default_rng(rng).integers(*pools[split], size=(rows, cols)))


def as_video(boards: Sequence[Board]) -> list[Image.Image]:
    """Pictures of a video in which each board is one frame.

    Two pictures of a video make one temporal patch, so each board is shown twice.
    """
    return [image for board in boards for image in [board.image()] * 2]


def _join(labels: np.ndarray) -> str:
    return "".join(map(str, labels))
