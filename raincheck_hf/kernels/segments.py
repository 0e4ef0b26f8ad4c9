"""Segments that attend within themselves, cut into blocks, and widths that are no power of two."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NARROWEST = 16  # what a product's tile may have


def block_table(lengths: Sequence[int], rows: int, device: torch.device) -> Tensor:
    """int32 [blocks, 3]: where a block starts, where its segment starts, and where it ends.

    Args:
        lengths: Of each segment, one behind the other.
        rows: Of a block at most; blocks do not reach from one segment into the next.
        device: The table's.
    """
    table, start = [], 0
    for length in lengths:
        stop = start + length
        table += [(first, start, stop) for first in range(start, stop, rows)]
        start = stop
    made = torch.tensor(table, dtype=torch.int32).reshape(-1, 3)
    if device.type != "cuda":
        return made.to(device)
    # From pinned memory, so that the host does not wait for what the device is at.
    return made.pin_memory().to(device, non_blocking=True)


def split_width(width: int) -> tuple[int, int]:
    """Two powers of two that cover a width with little to spare, 72 by 64 and 16.

    Returns:
        The greatest power of two that is no more than ``width``, and one for what is left, 0 where
        nothing is; each is 16 or more.
    """
    head = max(_NARROWEST, 1 << (width.bit_length() - 1))
    rest = max(0, width - head)
    return head, max(_NARROWEST, 1 << (rest - 1).bit_length()) if rest else 0
