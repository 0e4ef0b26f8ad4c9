"""What of a turn's report goes into a harness's log. Plain data, JSON-ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raincheck_hf.report import RaincheckReport

Figures = dict[str, Any]


def figures_of(report: RaincheckReport, input_tokens: int, output_tokens: int) -> Figures:
    """The figures of one turn.

    Args:
        report: The turn's report.
        input_tokens: Tokens of the whole conversation up to the answer.
        output_tokens: Generated tokens.

    Returns:
        `ttft_ms` and `tpot_ms`; `restored_fraction`, the part of the turn's deferred tokens that
        was restored when its answer ended (None where nothing was deferred, 0 for hard pruning);
        `n_visual`, `n_selected`, `n_deferred` and `restored_in_answer`, all of the turn's own
        images and videos; `input_tokens`, `output_tokens`.
    """
    restored = report.restored_in_answer
    return {
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "ttft_ms": report.ttft_ms,
        "tpot_ms": report.tpot_ms,
        "restored_fraction": restored / report.n_deferred if report.n_deferred else None,
        "n_visual": report.n_visual,
        "n_selected": report.n_selected,
        "n_deferred": report.n_deferred,
        "restored_in_answer": restored,
    }


def figures_of_rounds(rounds: Sequence[Figures]) -> Figures:
    """The figures of a conversation: means over its rounds, and the rounds themselves.

    Args:
        rounds: The figures of each round, in order.

    Returns:
        `ttft_ms` averaged over rounds, `tpot_ms` over decode steps, `restored_fraction` over
        deferred tokens; `input_tokens` of the last round, `output_tokens` of all; `rounds`.
    """
    steps = [max(one["output_tokens"] - 1, 0) for one in rounds]
    deferred = [one["n_deferred"] for one in rounds]
    return {
        "input_tokens": rounds[-1]["input_tokens"] if rounds else 0,
        "output_tokens": sum(one["output_tokens"] for one in rounds),
        "ttft_ms": mean([one["ttft_ms"] for one in rounds], [1] * len(rounds)),
        "tpot_ms": mean([one["tpot_ms"] for one in rounds], steps),
        "restored_fraction": mean([one["restored_fraction"] for one in rounds], deferred),
        "rounds": list(rounds),
    }


def mean(values: Sequence[float | None], weights: Sequence[int]) -> float | None:
    """The weighted mean of the values that are there; None without any."""
    pairs = [
        (value, weight)
        for value, weight in zip(values, weights, strict=True)
        if value is not None and weight
    ]
    if not pairs:
        return None
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
