"""What is taught when: conversation plans, and the order in which they come up.

Single cells of one board size come first. Once those are answered, a second size, rows, columns
and whole boards join, then everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from raincheck_hf.tiny.lessons import Plan, Turn

STAGES = ("cells", "reading", "everything")
_FIRST_SIZE = (8, 8)
_SIZES = ((8, 8), (12, 12))
_OTHER_SIZES = (
    *((4, 4), (6, 6), (10, 10), (16, 16), (5, 5), (7, 7), (9, 9), (3, 3)),
    *((6, 10), (10, 6), (8, 12), (12, 8), (4, 12), (12, 4), (5, 8), (9, 7), (2, 3), (11, 14)),
)
_MIX = {
    "cells": {"cells": 1.0},
    "reading": {"cells": 0.2, "lines": 0.25, "reading": 0.55},
    "everything": {
        **{"cells": 0.14, "lines": 0.12, "reading": 0.38},
        **{"several": 0.12, "later": 0.12, "video": 0.12},
    },
}
_SHUFFLED, _LATE = 0.15, 0.3
"""How often, in the last stage, visual tokens change places or come late."""
TOKENS = 56_000
"""About how many tokens a batch on a GPU holds."""


class Planner:
    """Draws plans for the stage at hand.

    Args:
        rng: where the choices come from.
        tokens: about how many tokens a batch holds.
        size: teach this board size only.
    """

    def __init__(
        self, rng: np.random.Generator, tokens: int = TOKENS, size: tuple[int, int] | None = None
    ):
        self._rng, self._tokens, self._size = rng, tokens, size

    def draw(self, stage: int) -> tuple[Plan, int]:
        """A plan, and how many rows to fill it with."""
        mix = _MIX[STAGES[stage]]
        style = self._rng.choice(list(mix), p=list(mix.values()))
        rows, cols = self._size or self._draw_size(stage, style)
        plan = getattr(self, f"_{style}")(rows, cols)
        if stage == len(STAGES) - 1:
            shuffled, late = self._rng.random(2) < (_SHUFFLED, _LATE)
            plan = replace(plan, shuffled=bool(shuffled), late=bool(late))
        length = plan.boards * rows * cols + sum(
            16 + {"cell": 1, "row": cols, "column": rows, "board": rows * cols}[turn.kind]
            for turn in plan.turns
        )
        return plan, max(2, min(512, self._tokens // length))

    def _draw_size(self, stage: int, style: str) -> tuple[int, int]:
        if stage == 0:
            return _FIRST_SIZE
        if style in ("several", "later", "video"):
            sizes: Sequence[tuple[int, int]] = ((8, 8), (8, 8), (4, 4), (6, 6), (12, 12))
        elif self._rng.random() < (0.75 if stage == 2 else 1.0):
            sizes = _SIZES
        else:
            sizes = _OTHER_SIZES
        return sizes[self._rng.integers(len(sizes))]

    def _place(self) -> str:
        return str(self._rng.choice(["before", "after", "answer"], p=[0.8, 0.1, 0.1]))

    def _system(self) -> bool:
        return bool(self._rng.random() < 0.1)

    def _short(self, target: int = 0, named: bool = False, lines: float = 0.0) -> Turn:
        kind = "cell"
        if self._rng.random() < lines:
            kind = str(self._rng.choice(["row", "column"]))
        return Turn(kind, target, named=named)

    def _show(self, turn: Turn, shown: int, place: str = "before") -> Turn:
        return Turn(turn.kind, turn.target, shown, turn.named, place)

    def _cells(self, rows: int, cols: int) -> Plan:
        turns = [self._short() for _ in range(14)]
        turns[0] = self._show(turns[0], 1, self._place())
        return Plan(rows, cols, tuple(turns), system=self._system())

    def _lines(self, rows: int, cols: int) -> Plan:
        turns = [self._short(lines=0.75) for _ in range(10)]
        turns[0] = self._show(turns[0], 1, self._place())
        return Plan(rows, cols, tuple(turns), system=self._system())

    def _reading(self, rows: int, cols: int) -> Plan:
        before, after = self._rng.choice([0, 0, 0, 1, 2]), self._rng.integers(1, 4)
        turns = [self._short(lines=0.3) for _ in range(before)]
        turns += [Turn("board"), *(self._short(lines=0.3) for _ in range(after))]
        turns[0] = self._show(turns[0], 1, self._place())
        return Plan(rows, cols, tuple(turns), system=self._system())

    def _several(self, rows: int, cols: int) -> Plan:
        shown = int(self._rng.integers(2, 5))
        turns = [
            self._short(int(self._rng.integers(shown)), named=True, lines=0.15) for _ in range(8)
        ]
        turns[0] = self._show(turns[0], shown)
        return Plan(rows, cols, tuple(turns), system=self._system())

    def _later(self, rows: int, cols: int) -> Plan:
        turns: list[Turn] = []
        for board in range(int(self._rng.integers(2, 4))):
            part = [self._short(board, lines=0.3) for _ in range(self._rng.integers(1, 4))]
            if self._rng.random() < 0.3:
                part.insert(int(self._rng.integers(len(part) + 1)), Turn("board", board))
            part[0] = self._show(part[0], 1)
            turns += part
            turns += [
                self._short(int(self._rng.integers(board + 1)), named=True)
                for _ in range(self._rng.integers(0, 3) if board else 0)
            ]
        return Plan(rows, cols, tuple(turns))

    def _video(self, rows: int, cols: int) -> Plan:
        shown = int(self._rng.integers(2, 6))
        turns = [self._short(int(self._rng.integers(shown)), named=True) for _ in range(8)]
        turns[0] = self._show(turns[0], shown)
        return Plan(rows, cols, tuple(turns), video_fps=float(self._rng.choice([24, 24, 2, 1])))
