"""Boards to ask about several times, shared by the tests of harnesses."""

from __future__ import annotations

from typing import Any

from raincheck_hf.tiny.boards import Board, make_board

CELLS = ((4, 3), (0, 0), (7, 6))
PRUNED: dict[str, Any] = {
    "retention": 0.3,
    "selector": "uniform",
    "guard_tokens": 2,
    "chunk_size": 7,
}
"""A configuration in which an answer of a row restores some of a board of 64, and not all."""


def board_of(number: int) -> Board:
    """An 8×8 board."""
    return make_board(8, 8, rng=[7, number])


def questions_of(board: Board) -> list[tuple[str, str]]:
    """A row first, whose answer is long enough for chunks to ride along; then cells."""
    return [board.ask_row(2), *(board.ask_cell(*cell) for cell in CELLS)]
