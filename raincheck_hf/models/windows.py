"""Vision towers that attend within windows (Qwen2.5-VL) hold their tokens window by window.

They put tokens back into source order only behind the merger, so that what is read before it has
to be put back here. Towers without windows are in source order throughout.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.vision_utils import get_vision_window_index


def whole_frame_block(tower: Any) -> int | None:
    """Index of the last block in which a patch sees its whole frame; None where none does."""
    blocks = range(len(tower.blocks))
    if not _windowed(tower):
        return blocks[-1]
    return max((i for i in blocks if i in tower.fullatt_block_indexes), default=None)


def in_source_order(tower: Any, grid_thw: Tensor, rows: Tensor) -> Tensor:
    """Token rows [n, ...] from inside the tower, put into the order of the grid.

    Args:
        tower: The vision tower.
        grid_thw: int64 [items, 3] in patches, of the same pass.
        rows: One row a token, as the tower holds them.
    """
    if not _windowed(tower):
        return rows
    held, _ = get_vision_window_index(
        grid_thw,
        spatial_merge_size=tower.spatial_merge_size,
        window_size=tower.window_size,
        patch_size=tower.patch_size,
    )
    return rows[held.argsort().to(rows.device)]


def _windowed(tower: Any) -> bool:
    return hasattr(tower, "fullatt_block_indexes")
