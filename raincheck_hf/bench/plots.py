"""What pictures have in common, and accuracy by output position. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raincheck_hf.bench.summary import ALL, Line

COLOURS = {
    "full": "#444444",
    "hard": "#d1495b",
    "raincheck": "#1f77b4",
    "post_answer": "#e8a33d",
    "relevance": "#2a9d60",
    "uncorrected": "#7b5ea7",
    "by_position": "#8c564b",
}
_MOST_ACROSS = 4
_REACH = 2
"""Positions to each side that the thick line averages over."""


def panels(count: int, size: tuple[float, float], across: int = _MOST_ACROSS) -> tuple[Any, Any]:
    """A figure and its panels, in rows of at most ``across``; what is left over is hidden.

    Args:
        count: How many panels.
        size: Width and height of one, in inches.
        across: The most in a row.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = min(across, count)
    down = -(-count // across)
    figure = Figure(figsize=(size[0] * across, size[1] * down + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(down, across, squeeze=False).ravel()
    for panel in every[count:]:
        panel.set_visible(False)
    for panel in every[:count]:
        panel.grid(alpha=0.25)
    return figure, every[:count]


def legend_below(figure: Any, every: Sequence[Any]) -> None:
    """One legend for all panels; each name once."""
    named: dict[str, Any] = {}
    for panel in every:
        handles, names = panel.get_legend_handles_labels()
        for handle, name in zip(handles, names, strict=True):
            named.setdefault(name, handle)
    if named:
        figure.legend(
            list(named.values()), list(named), loc="outside lower center", ncols=min(6, len(named)),
            frameon=False,
        )  # fmt: skip


def short(model: str) -> str:
    """A model's name without the folders above it."""
    return Path(model).name


def positions(lines: Sequence[Line]) -> Any:
    """Accuracy by position in the first answer, a panel for each model and selector.

    Args:
        lines: Of one task and one setting of chunk and guard; other spans than turn 1 are left out.
    """
    own = [line for line in lines if line.span == "turn 1" and line.dialogues == ALL]
    models = list(dict.fromkeys(line.model for line in own))
    selectors = list(dict.fromkeys(line.selector for line in own if line.selector))
    figure, every = panels(len(models) * len(selectors), (4.6, 2.7))
    names = [(model, selector) for model in models for selector in selectors]
    for panel, (model, selector) in zip(every, names, strict=True):
        shown = [line for line in own if line.model == model]
        _positions(panel, [line for line in shown if line.selector in (None, selector)])
        panel.set_title(f"{short(model)}, {selector}, {shown[0].boards} boards", fontsize=10)
        panel.set_xlabel("output position")
        panel.set_ylabel("accuracy")
    legend_below(figure, every)
    return figure


def _positions(panel: Any, lines: Sequence[Line]) -> None:
    for line in lines:
        values = np.array(line.by_position)
        at = np.arange(1, len(values) + 1)
        colour = COLOURS.get(line.way)
        panel.plot(at, values, color=colour, linewidth=0.6, alpha=0.35)
        # In a first answer post-answer is hard pruning: dashes let both be seen.
        dashes = "--" if line.way == "post_answer" else "-"
        panel.plot(at, smooth(values), dashes, color=colour, linewidth=2, label=line.way)
        if line.way == "raincheck" and line.restored_from and line.guard_tokens is not None:
            # The first chunk rides in pass guard + 1 and is visible where y_(guard + 3) is made.
            start = line.guard_tokens + 3
            panel.axvspan(start, line.restored_from, color=colour, alpha=0.12, linewidth=0)
    panel.set_ylim(0, 1.02)


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average [n], over fewer positions at both ends."""
    kernel = np.ones(2 * _REACH + 1)
    return (
        np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")
        if len(values) >= len(kernel)
        else values
    )
