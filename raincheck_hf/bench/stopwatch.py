"""Times of short work: medians with spread; on a GPU from a captured graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Spread = dict[str, float]


def spread(times: Sequence[float]) -> Spread:
    """`p20`, `p50` and `p80`."""
    ordered = sorted(times)
    at = {name: ordered[int(q * (len(ordered) - 1))] for name, q in (("p20", 0.2), ("p80", 0.8))}
    return {"p20": at["p20"], "p50": statistics.median(ordered), "p80": at["p80"]}


def microseconds(work: Callable[[], Any], device: str, runs: int, share: int = 1) -> Spread:
    """How long a piece of work takes, in µs.

    Args:
        work: Changes nothing, so that it can be run again; on a GPU it must be fit for capture.
        device: Where it runs. On a GPU its launches are captured once and replayed, so that the
            host's time to launch them does not count.
        runs: Timed runs, after one that is not timed.
        share: How many equal parts the work has; the time is of one.
    """
    again = _captured(work) if device.startswith("cuda") else work
    again()
    return spread([_once(again, device) / share for _ in range(runs)])


def _once(work: Callable[[], Any], device: str) -> float:
    if not device.startswith("cuda"):
        started = time.perf_counter()
        work()
        return (time.perf_counter() - started) * 1e6
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def _captured(work: Callable[[], Any]) -> Callable[[], Any]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is built on first use must not be captured
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
