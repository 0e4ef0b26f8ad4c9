# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Rotating the queries and keys of a vision block, in place in its joint projection.

(x_1, x_2) <- (x_1 cos - x_2 sin, x_2 cos + x_1 sin), the halves of a head, fp32 inside
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from raincheck_hf.kernels.launch import Repeated


@triton.jit
def _rotate(
    qkv, cos, sin, pitch, groups, HEADS: tl.constexpr, HALF: tl.constexpr,
    VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK groups of VECTOR adjacent pairs, whichever heads and patches they fall to.

    Args:
        qkv: [N, 3, heads, 2 HALF], rows ``pitch`` apart; q and k are written.
        cos, sin: fp32 [N, HALF].
        groups: In all.
        HEADS: query and key heads together.
    """
    A_HEAD: tl.constexpr = HALF // VECTOR
    A_ROW: tl.constexpr = HEADS * A_HEAD
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = (group // A_ROW).to(tl.int64)
    head = group % A_ROW // A_HEAD
    near = tl.arange(0, VECTOR)[None, :]
    column = (group % A_HEAD * VECTOR)[:, None] + near
    inside = (group < groups)[:, None] & (near < VECTOR)
    c = tl.load(cos + row[:, None] * HALF + column, mask=inside, other=0.0)
    s = tl.load(sin + row[:, None] * HALF + column, mask=inside, other=0.0)
    at = qkv + (row * pitch + head * (2 * HALF))[:, None] + column
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (first * c - second * s).to(qkv.dtype.element_ty), mask=inside)
    tl.store(at + HALF, (second * c + first * s).to(qkv.dtype.element_ty), mask=inside)


def rotate_plain(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Twin of `rotation`: a new [N, 3, heads, e] with q and k rotated."""
    half = cos.shape[1]
    wide = qkv if qkv.dtype == torch.float64 else qkv.float()
    c, s = (table[:, None, None].to(wide.dtype) for table in (cos, sin))
    first, second = wide[:, :2, :, :half], wide[:, :2, :, half:]
    turned = torch.cat([first * c - second * s, second * c + first * s], dim=-1)
    return torch.cat([turned.to(qkv.dtype), qkv[:, 2:]], dim=1)


def rotation(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, block: int = 512, warps: int = 8
) -> Callable[[Tensor], None]:
    """A launch that rotates q and k of tensors like ``qkv`` in place.

    Args:
        qkv: [N, 3, heads, e], contiguous.
        cos: fp32 [N, e / 2], contiguous.
        sin: fp32 [N, e / 2], contiguous.
        block: Groups of pairs of a program, a power of two.
        warps: Of a program.

    Raises:
        ValueError: A shape, dtype or layout is not as above.
    """
    rows, three, heads, dim = qkv.shape
    if three != 3 or dim % 2 or not qkv.is_contiguous():
        raise ValueError(f"qkv must be contiguous [N, 3, heads, e]; got {list(qkv.shape)}")
    for table in (cos, sin):
        if table.shape != (rows, dim // 2) or table.dtype != torch.float32:
            raise ValueError(f"cos and sin must be fp32 [{rows}, {dim // 2}]")
        if not table.is_contiguous():
            raise ValueError("cos and sin must be contiguous")
    half = dim // 2
    vector = math.gcd(half, 4)
    groups = rows * 2 * heads * (half // vector)
    options = {"HEADS": 2 * heads, "HALF": half, "VECTOR": vector, "BLOCK": block}
    launch = Repeated(_rotate, (triton.cdiv(groups, block),), {**options, "num_warps": warps})

    def run(qkv: Tensor) -> None:
        with torch.cuda.device_of(qkv):
            launch(qkv, cos, sin, qkv.stride(0), groups)

    return run
