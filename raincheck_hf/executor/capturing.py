"""Recording launches into a CUDA graph, one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")

_one_at_a_time = threading.Lock()  # PyTorch records on one stream of its own


def record(launch: Callable[[], Made], device: torch.device, pool: Any = None) -> tuple[Any, Made]:
    """A graph of what ``launch`` launches, and what it returned, whose memory is the graph's.

    Everything that ``launch`` compiles must be compiled before. Other threads may go on meanwhile.

    Args:
        launch: Launches on the current stream.
        device: A GPU.
        pool: Memory that graphs share which never run at the same time; None for memory of its own.
    """
    with _one_at_a_time:
        torch.cuda.current_stream(device).synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            made = launch()
    return graph, made
