"""Pictures of suffix maps, of memory and of follow-ups that wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from raincheck_hf.bench.live import COMPONENTS
from raincheck_hf.bench.plots import legend_below, panels, short
from raincheck_hf.bench.rows import Row

_SHADES = ("#9aa5b1", "#1f77b4", "#2a9d60", "#e8a33d", "#7b5ea7")


def state_map_figures(rows: Sequence[Row]) -> Iterator[tuple[str, Any]]:
    """Norm of Φ by layer, error of the join, and times, along the suffix length."""
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        figure, (norm, error, cost) = panels(3, (4.6, 3.2))
        layers = list(dict.fromkeys(row["layer"] for row in own))
        for layer in layers:
            some = sorted((row for row in own if row["layer"] == layer), key=_suffix)
            x = [row["suffix"] for row in some]
            norm.plot(x, [row["norm"]["mean"] for row in some], "o-", label=f"layer {layer}")
        some = sorted((row for row in own if row["layer"] == layers[0]), key=_suffix)
        x = [row["suffix"] for row in some]
        for name, key in (("map, a token", "token_us"), ("join", "join_us"),
                          ("replay instead", "replay_us")):  # fmt: skip
            cost.plot(x, [row[key]["p50"] for row in some], "o-", label=name)
        for name, key in (("join", "error"), ("replay, fp32", "replay_error"),
                          ("without join", "unjoined")):  # fmt: skip
            largest = [max(row[key] for row in own if row["suffix"] == at) for at in x]
            error.plot(x, largest, "o-", label=name)
        for panel, title in (
            (norm, "spectral norm of Φ, mean over heads"),
            (error, "relative RMS error, largest over layers"),
            (cost, f"µs, layer {layers[0]}, {own[0]['device']}"),
        ):
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            panel.set_title(title, fontsize=10)
            panel.set_xlabel("suffix length")
            panel.legend(fontsize=7, ncols=1 + len(layers) // 9)
        figure.suptitle(short(model), fontsize=11)
        yield f"state-map-{short(model)}", figure


def _suffix(row: Row) -> int:
    return int(row["suffix"])


def memory_figures(rows: Sequence[Row]) -> Iterator[tuple[str, Any]]:
    """Peak and steady bytes beside the weights, stacked by component."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, every = panels(len(models), (4.6, 3.4))
    beside = [name for name in COMPONENTS if name != "weights"]
    for panel, model in zip(every, models, strict=True):
        own = [row for row in rows if row["model"] == model]
        bars = [(row, when) for row in own for when in ("peak", "steady")]
        bottom = np.zeros(len(bars))
        for component, shade in zip(beside, _SHADES[1:], strict=True):
            sizes = np.array([row[when][component] for row, when in bars]) / 2**20
            panel.bar(range(len(bars)), sizes, bottom=bottom, color=shade, label=component)
            bottom += sizes
        names = [f"{row['way']}\n{when}" for row, when in bars]
        panel.set_xticks(range(len(bars)), names, fontsize=7)
        weights = own[0]["steady"]["weights"] / 2**20
        panel.set_title(f"{short(model)}, beside {weights:.1f} MiB of weights", fontsize=10)
        panel.set_ylabel("MiB")
    legend_below(figure, every)
    yield "memory", figure


def gaps_figures(rows: Sequence[Row]) -> Iterator[tuple[str, Any]]:
    """Share of follow-ups that wait, and their mean wait, along the pending tokens."""
    figure, (share, wait) = panels(2, (4.6, 3.2))
    for model, rate in dict.fromkeys((row["model"], row["given_rate"]) for row in rows):
        own = [row for row in rows if (row["model"], row["given_rate"]) == (model, rate)]
        own.sort(key=lambda row: row["pending"])
        x = [row["pending"] for row in own]
        name = f"{short(model or 'given')}, {own[0]['rate']:.0f} tokens/s"
        share.plot(x, [100 * row["share"] for row in own], "o-", label=name)
        wait.plot(x, [row["mean_s"] for row in own], "o-", label=name)
    share.set_ylabel("follow-ups that wait [%]")
    wait.set_ylabel("mean wait over all follow-ups [s]")
    for panel in (share, wait):
        panel.set_xlabel("tokens pending when the answer ended")
    legend_below(figure, (share,))
    yield "gaps", figure
