"""Pictures of quality rows: recovery by selector, and curves along the axes of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from raincheck_hf.bench.context import Seen, seen
from raincheck_hf.bench.kinds import base_of, of_one_kind
from raincheck_hf.bench.plots import COLOURS, legend_below, panels, positions, short
from raincheck_hf.bench.rows import Row
from raincheck_hf.bench.summary import ALL, Line, summarise

_COMPARED = ("full", "hard", "raincheck", "post_answer")
"""The others ran with few selectors, and have tables of their own."""

_FIELDS = ("retention", "chunk_size", "guard_tokens")


def quality_figures(rows: Sequence[Row]) -> Iterator[tuple[str, Any]]:
    """Names and figures, as far as the rows have something to show.

    Where rows of a task and model differ in board size, seed or the like, the most frequent kind
    is drawn.
    """
    own = of_one_kind(rows)
    whole = [line for line in summarise(own) if line.dialogues == ALL]
    base = base_of(whole)
    if base is None:
        return
    for task in dict.fromkeys(line.task for line in whole):
        lines = [line for line in whole if line.task == task]
        usual = [line for line in lines if line.way in _COMPARED and base.fits(line)]
        if any(line.way == "raincheck" for line in usual):
            yield f"recovery-{task}", _recovery(usual)
            if len(usual[0].by_position) > 1:
                yield f"positions-{task}", positions(usual)
        for axis in _FIELDS:
            curve = _varied(axis, [line for line in lines if base.along(axis, vars(line))])
            if curve:
                yield f"sweep-{axis.replace('_', '-')}-{task}", _curves(axis, curve)
        some = [
            one for one in seen(own) if one.task == task and base.along("retention", one.fields)
        ]
        if len({one.point for one in some}) > 1:
            yield f"context-{task}", _context(some)


def _varied(axis: str, lines: Sequence[Line]) -> list[Line]:
    """Those of selectors that ran at more than one value."""
    values: dict[str | None, set[Any]] = {}
    for line in lines:
        values.setdefault(line.selector, set()).add(getattr(line, axis))
    return [line for line in lines if len(values[line.selector]) > 1]


def _recovery(lines: Sequence[Line]) -> Any:
    """Recovery with intervals, by selector and way; a panel for each model and span."""
    models = list(dict.fromkeys(line.model for line in lines))
    spans = [span for span in ("turn 1", "turns 2+", "all turns") if _has(lines, span)]
    figure, every = panels(len(models) * len(spans), (4.6, 3.0), across=len(spans))
    places = [(model, span) for model in models for span in spans]
    for panel, (model, span) in zip(every, places, strict=True):
        own = [line for line in lines if (line.model, line.span) == (model, span)]
        own = [line for line in own if line.recovery and not np.isnan(line.recovery.point)]
        selectors = list(dict.fromkeys(line.selector for line in own))
        ways = list(dict.fromkeys(line.way for line in own))
        for at, way in enumerate(ways):
            some = [line for line in own if line.way == way]
            x = [
                selectors.index(line.selector) + (at - (len(ways) - 1) / 2) * 0.18 for line in some
            ]
            found = [line.recovery for line in some if line.recovery]
            y = np.array([one.point for one in found])
            spread = np.array([[one.low for one in found], [one.high for one in found]])
            bars = np.abs(spread - y)
            panel.errorbar(x, y, yerr=bars, fmt="o", color=COLOURS.get(way), label=way, capsize=2)
        panel.set_xticks(range(len(selectors)), selectors, rotation=40, ha="right", fontsize=8)
        panel.set_xlim(-0.6, len(selectors) - 0.4)
        panel.set_title(f"{short(model)}, {span}", fontsize=10)
        panel.set_ylabel("recovery")
        panel.set_ylim(min(-0.05, panel.get_ylim()[0]), 1.08)
    legend_below(figure, every)
    return figure


def _has(lines: Sequence[Line], span: str) -> bool:
    return any(line.span == span for line in lines)


def _curves(axis: str, lines: Sequence[Line]) -> Any:
    """Accuracy of full, hard and raincheck along an axis; a panel for each model and span."""
    models = list(dict.fromkeys(line.model for line in lines))
    spans = [span for span in ("turn 1", "turns 2+") if _has(lines, span)]
    figure, every = panels(len(models) * len(spans), (4.6, 3.0), across=len(spans))
    places = [(model, span) for model in models for span in spans]
    for panel, (model, span) in zip(every, places, strict=True):
        own = [line for line in lines if (line.model, line.span) == (model, span)]
        for selector in dict.fromkeys(line.selector for line in own):
            some = sorted(
                (line for line in own if line.selector == selector),
                key=lambda line: getattr(line, axis),
            )
            x = [getattr(line, axis) for line in some]
            mark = "" if selector == own[0].selector else f", {selector}"
            panel.plot(x, [line.full for line in some], "--", color=COLOURS["full"], label="full")
            for way, values in {
                "hard": [line.hard for line in some],
                "raincheck": [line.accuracy.point for line in some],
            }.items():
                panel.plot(x, values, "o-", color=COLOURS[way], label=way + mark)
            panel.fill_between(
                x, [line.accuracy.low for line in some], [line.accuracy.high for line in some],
                color=COLOURS["raincheck"], alpha=0.15, linewidth=0,
            )  # fmt: skip
        panel.set_title(f"{short(model)}, {span}", fontsize=10)
        panel.set_xlabel(axis.replace("_", " "))
        panel.set_ylabel("accuracy")
        panel.set_ylim(0, 1.02)
    legend_below(figure, every)
    return figure


def _context(found: Sequence[Seen]) -> Any:
    """Share of visual tokens available, against the share in the initial prefill."""
    models = list(dict.fromkeys(one.model for one in found))
    figure, every = panels(len(models), (4.6, 3.2))
    for panel, model in zip(every, models, strict=True):
        own = sorted((one for one in found if one.model == model), key=lambda one: one.initial)
        x = [one.initial for one in own]
        panel.plot(x, x, "--", color=COLOURS["hard"], label="in the initial prefill")
        panel.plot(x, [one.mean for one in own], "o", color=COLOURS["raincheck"], label="mean")
        panel.plot(
            x, [one.last for one in own], "^", color=COLOURS["relevance"], label="at the end"
        )
        panel.set_title(f"{short(model)}, {own[0].task}", fontsize=10)
        panel.set_xlabel("share of visual tokens in the initial prefill")
        panel.set_ylabel("available to the answer")
        panel.set_ylim(0, 1.05)
    legend_below(figure, every)
    return figure
