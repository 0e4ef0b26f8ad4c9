# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Rotating the queries and keys of a vision block, in place in its joint projection.

(x_1, x_2) <- (x_1 cos - x_2 sin, x_2 cos + x_1 sin), the halves of a head, fp32 inside
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from raincheck_hf.kernels.launch import Repeated


@triton.jit
def _rotate(
    qkv, cos, sin, pitch, HEADS: tl.constexpr, HALF: tl.constexpr,
    LINES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """All query and key heads of one patch; they lie one behind the other.

    Args:
        qkv: [N, 3, heads, 2 HALF], rows ``pitch`` apart; q and k are written.
        cos, sin: fp32 [N, HALF].
        HEADS: query and key heads together.
        LINES, WIDE: HEADS and HALF, rounded up to powers of two.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, LINES)
    near = tl.arange(0, WIDE)
    c = tl.load(cos + row * HALF + near, mask=near < HALF, other=0.0)[None, :]
    s = tl.load(sin + row * HALF + near, mask=near < HALF, other=0.0)[None, :]
    inside = (head < HEADS)[:, None] & (near < HALF)[None, :]
    at = qkv + row * pitch + head[:, None] * (2 * HALF) + near[None, :]
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


def rotation(qkv: Tensor, cos: Tensor, sin: Tensor) -> Callable[[Tensor], None]:
    """A launch that rotates q and k of tensors like ``qkv`` in place.

    Args:
        qkv: [N, 3, heads, e], contiguous.
        cos: fp32 [N, e / 2], contiguous.
        sin: fp32 [N, e / 2], contiguous.

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
    launch = Repeated(
        _rotate,
        (rows,),
        {
            "HEADS": 2 * heads,
            "HALF": dim // 2,
            "LINES": triton.next_power_of_2(2 * heads),
            "WIDE": triton.next_power_of_2(dim // 2),
        },
    )

    def run(qkv: Tensor) -> None:
        with torch.cuda.device_of(qkv):
            launch(qkv, cos, sin, qkv.stride(0))

    return run
