# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Residual add and LayerNorm of a vision block in one pass over memory. See VISION.md.

Twin: `add_norm_plain`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import layer_norm

from raincheck_hf.kernels.launch import Repeated


@triton.jit
def _add_norm(
    x, more, weight, bias, summed, normed, rows, eps,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows: summed = x + more, rounded; normed = LN(summed), fp32 inside.

    Args:
        x, more: [T, WIDTH], contiguous.
        summed, normed: [T, WIDTH], contiguous, written; summed may be x.
        WIDE: WIDTH, rounded up to a power of two.
    """
    TYPE: tl.constexpr = summed.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, WIDE)[None, :]
    inside = (row < rows)[:, None] & (at < WIDTH)
    place = row.to(tl.int64)[:, None] * WIDTH + at
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(more + place, mask=inside, other=0.0).to(tl.float32)
    low = value.to(TYPE)
    tl.store(summed + place, low, mask=inside)
    value = low.to(tl.float32)
    mean = tl.sum(value, 1) / WIDTH
    # What lies behind the last column has no part in the spread.
    value = tl.where(inside, value - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)
    gamma = tl.load(weight + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    beta = tl.load(bias + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    tl.store(normed + place, (value * scale[:, None] * gamma + beta).to(TYPE), mask=inside)


def add_norm_plain(
    x: Tensor, more: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Twin of `repeated_add_norm`: x + more in their dtype, and its LayerNorm, fp32 inside."""
    summed = x + more
    wide = summed if summed.dtype == torch.float64 else summed.float()
    gamma, beta = weight.to(wide.dtype), bias.to(wide.dtype)
    return summed, layer_norm(wide, (x.shape[-1],), gamma, beta, eps).to(x.dtype)


def repeated_add_norm(
    like: Tensor, *, rows: int = 1, warps: int = 4
) -> Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """A launch for tensors of one shape and dtype: looked up once.

    Args:
        like: [T, d], of the shape and dtype of what is added.
        rows: Of a program, a power of two.
        warps: Of a program.

    Returns:
        What takes x, more [T, d], weight and bias [d], all contiguous, and what is added to the
        variance; it returns new tensors x + more and LN(x + more).

    Raises:
        ValueError: Here or by what is returned: a shape, dtype or layout is not as above.
    """
    if like.ndim != 2:
        raise ValueError(f"rows must be [T, d], got {list(like.shape)}")
    count, width = like.shape
    wide = triton.next_power_of_2(width)
    options = {"WIDTH": width, "WIDE": wide, "ROWS": rows, "num_warps": warps}
    launch = Repeated(_add_norm, (triton.cdiv(count, rows),), options)

    shape, dtype = like.shape, like.dtype  # the tensor itself is let go

    def run(
        x: Tensor, more: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        for part, want in ((x, shape), (more, shape), (weight, shape[1:]), (bias, shape[1:])):
            if part.shape != want or part.dtype != dtype or not part.is_contiguous():
                raise ValueError(
                    f"want contiguous {dtype} {list(want)}, got {part.dtype} {list(part.shape)} "
                    f"with strides {list(part.stride())}"
                )
        summed, normed = torch.empty_like(x), torch.empty_like(x)
        with torch.cuda.device_of(x):
            launch(x, more, weight, bias, summed, normed, count, eps)
        return summed, normed

    return run
