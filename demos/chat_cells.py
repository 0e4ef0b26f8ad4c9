"""From a session's report to the state of each cell of its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from chat_media import Medium

from raincheck_hf import RaincheckReport

STATES = ("selected", "restored", "pending", "dropped")
SELECTED, RESTORED, PENDING, DROPPED = range(len(STATES))


@dataclass(frozen=True, eq=False)
class Panel:
    """One picture, or one frame of a video, and its cells.

    Attributes:
        name: What it shows.
        shown: The picture, as a data URI.
        states: int8 [rows, columns], indices into ``STATES``.
    """

    name: str
    shown: str
    states: np.ndarray

    def count(self, state: int) -> int:
        """Cells in a state."""
        return int((self.states == state).sum())


def cell_states(report: RaincheckReport, drops: bool) -> np.ndarray:
    """The state of each multimodal token of a turn, in source order.

    Deferred tokens are restored in the order of ``report.deferred``, so how many are back says
    which ones are.

    Args:
        report: The turn's report, at any time.
        drops: Whether the turn's deferred tokens were dropped (hard pruning).

    Returns:
        int8 [n_visual], indices into ``STATES``.
    """
    tokens = torch.cat([report.selected, report.deferred]).sort().values
    states = np.full(len(tokens), DROPPED if drops else PENDING, dtype=np.int8)
    back = 0 if drops else report.n_deferred - report.pending
    states[torch.searchsorted(tokens, report.selected).numpy()] = SELECTED
    states[torch.searchsorted(tokens, report.deferred[:back]).numpy()] = RESTORED
    return states


def panels(
    media: Sequence[Medium], grids: Sequence[tuple[int, int, int]], states: np.ndarray
) -> list[Panel]:
    """Cut a turn's states into pictures and frames.

    Args:
        media: The turn's pictures and videos, in source order.
        grids: (frames, rows, columns) of each, in cells.
        states: int8 [n_visual].
    """
    found: list[Panel] = []
    start = 0
    for medium, (frames, rows, columns) in zip(media, grids, strict=True):
        for frame in range(frames):
            cells = states[start : start + rows * columns].reshape(rows, columns)
            start += rows * columns
            at = int((frame + 0.5) * len(medium.shown) / frames)
            name = medium.name if frames == 1 else f"{medium.name}, frame {frame + 1}"
            found.append(Panel(name, medium.shown[at], cells))
    return found


def blank(medium: Medium) -> list[Panel]:
    """A picture that the model has not seen yet: no cells."""
    return [Panel(medium.name, medium.shown[0], np.zeros((0, 0), dtype=np.int8))]
