"""Calls of `generate`, and what is read off them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from raincheck_hf import RaincheckConfig

Inputs = dict[str, Tensor]


def ours(model: Any, inputs: Inputs, tokens: int, cache: Any = None, **fields: Any) -> Any:
    """One greedy raincheck turn of exactly ``tokens`` tokens; ``fields`` are the config's."""
    config = RaincheckConfig(**{"selector": "mmtok", "completion": "lazy", **fields})
    return model.generate(**inputs, raincheck=config, cache=cache, **_greedy(tokens))


def stock(model: Any, inputs: Inputs, tokens: int) -> Any:
    """The same without raincheck."""
    types = inputs["input_ids"].clone()
    kinds = {model.config.image_token_id: 1, model.config.video_token_id: 2}
    for token, kind in kinds.items():
        types[inputs["input_ids"] == token] = kind
    types[types > 2] = 0
    return model.generate(**inputs, mm_token_type_ids=types, **_greedy(tokens))


def _greedy(tokens: int) -> dict[str, Any]:
    return {
        "max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False,
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip


def elapsed(work: Callable[[], Any]) -> tuple[float, Any]:
    """ms on the clock until the device is done, and the result."""
    wait()
    started = time.perf_counter()
    result = work()
    wait()
    return (time.perf_counter() - started) * 1e3, result


def interleaved(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Figures of each side, taken in turns; the first round warms up and is left out."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, measure in sides.items():
            value = measure()
            if number:
                found[name].append(value)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """p20, p50 and p80, with four digits."""
    ordered = sorted(values)

    def at(part: float) -> float:
        return ordered[round(part * (len(ordered) - 1))]

    figures = {"p20": at(0.2), "p50": statistics.median(ordered), "p80": at(0.8)}
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


def ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Of two medians."""
    return float(f"{statistics.median(above) / statistics.median(below):.4g}")


def wait() -> None:
    """Until the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def captured(work: Callable[[], Any], repeats: int = 20) -> list[float]:
    """µs of work replayed from a graph; on a CPU, of the work itself."""
    work()
    wait()
    if not torch.cuda.is_available():
        return [elapsed(work)[0] * 1e3 for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for number in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(begin.elapsed_time(end) * 1e3)
    return times
