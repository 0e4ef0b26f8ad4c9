"""What decode could see: the share of visual tokens available to each token of an answer (§D.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def shares(row: Mapping[str, Any]) -> np.ndarray:
    """Share of the visual tokens that each token of the first answer was made with.

    The first two tokens have the initial partition alone; a chunk that rides in the pass that
    consumes y_t is first visible where y_(t+2) is made.

    Args:
        row: Of a quality measurement.

    Returns:
        fp64 [answer tokens], an end token included.
    """
    available = np.full(row["answer_tokens"][0], len(row["selected"]), dtype=float)
    for step, restored in enumerate(row["restored_per_step"]):
        available[step + 2 :] += restored
    return available / row["n_visual"]


def nothing_rode(row: Mapping[str, Any]) -> bool:
    """Whether the first answer ended inside the guard, though something waited to be restored."""
    waits = len(row["selected"]) < row["n_visual"]
    return row["guard_tokens"] is not None and waits and not sum(row["restored_per_step"])
