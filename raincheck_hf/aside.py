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

_beside: dict[tuple[torch.device, int], Any] = {}


class Aside:
    """A stream beside the current one; where there is none, work is done in place."""

    def __init__(self, device: torch.device) -> None:
        """Find the stream.

        Args:
            device: Where the work is; anything but a GPU has no streams.
        """
        self._own: Any = None
        self._kept: list[Tensor] = []
        if device.type == "cuda":
            main = torch.cuda.current_stream(device)
            # Always the same one beside a stream: memory that was used there is used again after
            # both, because work there starts behind the other's.
            key = (main.device, main.cuda_stream)
            if key not in _beside:
                _beside[key] = torch.cuda.Stream(main.device)
            self._own = _beside[key]

    @contextmanager
    def queue(self, *used: Tensor) -> Iterator[None]:
        """Run on the stream aside, behind all that is queued on the current one.

        Args:
            *used: Tensors made on the current stream, held until ``join``.
        """
        if self._own is None:
            yield
            return
        self._kept += used
        self._own.wait_stream(torch.cuda.current_stream(self._own.device))
        with torch.cuda.stream(self._own):
            yield

    def join(self) -> None:
        """Let the current stream wait for what was queued aside. Harmless when done again."""
        if self._own is not None:
            torch.cuda.current_stream(self._own.device).wait_stream(self._own)
            self._kept.clear()
