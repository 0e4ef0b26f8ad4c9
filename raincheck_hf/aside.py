"""Work queued beside the caller's stream, so that what the caller does next does not wait for it.

Whoever makes a small tensor on a GPU copies it from pageable memory, and such a copy waits for the
stream that it is on; the stock loop does it several times before its first forward. Queued aside,
the vision tower runs meanwhile, and the language model's pass is launched before the tower is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_streams: dict[tuple[torch.device, int], Any] = {}


class Aside:
    """A stream beside the current one; where there is none, work is done in place.

    Threads share it. Memory that crosses from one stream to the other is told to the allocator,
    which then keeps it until both are done with it.
    """

    def __init__(self, device: torch.device) -> None:
        """Find the stream.

        Args:
            device: Where the work is; anything but a GPU has no streams.
        """
        self._own: Any = None
        if device.type == "cuda":
            main = torch.cuda.current_stream(device)
            key = (main.device, main.cuda_stream)
            if key not in _streams:
                _streams[key] = torch.cuda.Stream(main.device)
            self._own = _streams[key]

    @contextmanager
    def queue(self, *used: Tensor) -> Iterator[None]:
        """Run on the stream aside, behind all that is queued on the current one.

        Args:
            *used: Tensors made on the current stream that the work reads.
        """
        if self._own is not None:
            for tensor in used:
                if tensor.is_cuda:
                    tensor.record_stream(self._own)
            self._own.wait_stream(torch.cuda.current_stream(self._own.device))
        with self.further():
            yield

    @contextmanager
    def further(self) -> Iterator[None]:
        """Run on the stream aside, beside all that was queued on the current one since.

        The work reads what was made aside, or what was handed to ``queue`` before.
        """
        if self._own is None:
            yield
            return
        with torch.cuda.stream(self._own):
            yield

    def join(self, *made: Tensor) -> None:
        """Let the current stream wait for what was queued aside.

        Args:
            *made: Tensors made there that are read here from now on.
        """
        if self._own is None:
            return
        main = torch.cuda.current_stream(self._own.device)
        main.wait_stream(self._own)
        for tensor in made:
            tensor.record_stream(main)
