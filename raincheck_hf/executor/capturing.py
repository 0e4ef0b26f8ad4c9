"""Recording launches into CUDA graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")

_one_at_a_time = threading.Lock()  # recording synchronises the device and empties its caches


class Recorder:
    """Makes graphs that never run at the same time, and so share memory.

    They are recorded on one stream of their own: PyTorch gives matrix products a workspace a
    stream, which graphs then share, too.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing is made on the device yet.

        Args:
            device: Where graphs will run; recording needs a GPU.
        """
        self._device = device
        self._stream: Any = None
        self._pool: Any = None

    def record(self, launch: Callable[[], Made]) -> tuple[Any, Made] | None:
        """A graph of what ``launch`` launches, and what it returned, whose memory is the graph's.

        None where memory does not suffice. All that ``launch`` compiles must be compiled before.
        """
        with _one_at_a_time, torch.cuda.device(self._device):
            torch.cuda.current_stream().synchronize()
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream,
                    capture_error_mode="thread_local",
                ):  # fmt: skip
                    made = launch()
            except torch.OutOfMemoryError:
                self._pool = None  # it may have had no graph but this one
                return None
        return graph, made
