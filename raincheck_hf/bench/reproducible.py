"""PyTorch's settings for runs whose bits are compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def reproducible() -> Iterator[None]:
    """Without cuDNN's attention: for one row under a mask its sums differ from call to call.

    7 of 400 calls did, on an H200 with torch 2.11.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
