"""Accuracy by output position, as a picture. Needs matplotlib, which is in the `demo` extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raincheck_hf.bench.summary import Line

_COLOURS = {
    "full": "#444444",
    "hard": "#d1495b",
    "raincheck": "#1f77b4",
    "post_answer": "#e8a33d",
    "uncorrected": "#7b5ea7",
}
_REACH = 2
"""Positions to each side that the thick line averages over."""


def plot_positions(lines: Sequence[Line], guard: int, path: Path) -> None:
    """Draw a panel for each model and selector.

    Args:
        lines: Of one task, and one span of turns.
        guard: Plain decode passes, marked in the picture.
        path: The PNG.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(line.model for line in lines))
    selectors = list(dict.fromkeys(line.selector for line in lines if line.selector))
    size = (6.5 * len(selectors), 3.2 * len(models) + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(models), len(selectors), squeeze=False, sharex=True, sharey=True)
    for row, model in zip(panels, models, strict=True):
        for panel, selector in zip(row, selectors, strict=True):
            shown = [line for line in lines if line.model == model]
            _panel(panel, [line for line in shown if line.selector in (None, selector)], guard)
            panel.set_title(f"{Path(model).name}, {selector}, {shown[0].boards} boards")
    for panel in panels[-1]:
        panel.set_xlabel("output position")
    for row in panels:
        row[0].set_ylabel("accuracy")
    handles, names = panels[0][0].get_legend_handles_labels()
    for row in panels:  # the last model may have ways that the first has not
        more = zip(*row[0].get_legend_handles_labels(), strict=True)
        for handle, name in more:
            if name not in names:
                handles, names = [*handles, handle], [*names, name]
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(path, dpi=130)


def _panel(panel: Any, lines: Sequence[Line], guard: int) -> None:
    for line in lines:
        values = np.array(line.by_position)
        at = np.arange(1, len(values) + 1)
        colour = _COLOURS.get(line.way)
        panel.plot(at, values, color=colour, linewidth=0.6, alpha=0.35)
        # In a first answer post-answer is hard pruning: dashes let both be seen.
        dashes = "--" if line.way == "post_answer" else "-"
        panel.plot(at, smooth(values), dashes, color=colour, linewidth=2, label=line.way)
        if line.way == "raincheck" and line.restored_from is not None:
            # The first chunk rides in pass guard + 1 and is visible where y_(guard + 3) is made.
            panel.axvspan(guard + 3, line.restored_from, color=colour, alpha=0.12, linewidth=0)
    panel.set_ylim(0, 1.02)
    panel.grid(alpha=0.25)


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving average [n], over fewer positions at both ends."""
    kernel = np.ones(2 * _REACH + 1)
    return (
        np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")
        if len(values) >= len(kernel)
        else values
    )
