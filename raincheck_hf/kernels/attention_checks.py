"""What the launchers of an attention layer refuse, and options of a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from raincheck_hf.kernels.descriptor import HEADER, RECORD_SIZE

TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
"""The dtypes that the kernels take."""


def check_descriptor(header: Tensor | None, record: Tensor | None) -> None:
    """Refuse a header or a record that a kernel would read past its end.

    Raises:
        ValueError: not contiguous int64 of the sizes in `descriptor`.
    """
    for name, part, size in (
        ("header", header, HEADER.value),
        ("record", record, RECORD_SIZE.value),
    ):
        if part is None:
            continue
        if part.dtype != torch.int64 or part.ndim != 1 or len(part) < size or part.stride(0) != 1:
            raise ValueError(
                f"{name} must be contiguous int64 [{size}], got {part.dtype} {list(part.shape)}"
            )


def check_heads(
    name: str, x: Tensor, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> tuple[int, int, int]:
    """Refuse what is not [rows, heads, dim], dim a power of two from 16, contiguous within dim.

    Returns:
        The shape.

    Raises:
        ValueError: it is not, or differs from `shape` or `dtype`.
    """
    if x.ndim != 3 or 0 in x.shape or x.dtype not in TRITON_TYPES or x.stride(2) != 1:
        raise ValueError(
            f"{name} must be [rows, heads, dim] in fp32, bf16 or fp16 with inner stride 1; "
            f"got {x.dtype} {list(x.shape)} with strides {x.stride()}"
        )
    if shape is not None and (x.shape != tuple(shape) or x.dtype != dtype):
        raise ValueError(f"{name} must be {dtype} {list(shape)}, got {x.dtype} {list(x.shape)}")
    rows, heads, dim = x.shape
    if dim < 16 or dim & (dim - 1):
        raise ValueError(f"a head's dim must be a power of two from 16, got {dim}")
    return rows, heads, dim


def launch_options(x: Tensor, warps: int, stages: int | None = None) -> dict[str, Any]:
    """Keyword arguments of a launch; on a CPU kernels are interpreted and take none."""
    if not x.is_cuda:
        return {}
    options = {"num_warps": warps}
    return options if stages is None else options | {"num_stages": stages}
