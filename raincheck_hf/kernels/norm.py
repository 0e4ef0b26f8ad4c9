# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""RMSNorm as Qwen's layers have it, one row of any width a program. Twins: `*_plain`.

y = x / sqrt(mean(x^2) + eps) * (offset + w)            layers: offset 0 (Qwen3) or 1 (Qwen3.5)
y = x / sqrt(mean(x^2) + eps) * w * silu(z)             behind a recurrent mixer, a head a row
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu

from raincheck_hf.kernels.launch import Repeated


@triton.jit
def _rms_norm(
    x, x_stride, weight, gate, gate_stride, out, heads, width, eps,
    OFFSET: tl.constexpr, GATED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One row, or one head of one row.

    Args:
        x: [T, heads * width], rows ``x_stride`` apart.
        gate: [T, heads * width], rows ``gate_stride`` apart; read where GATED.
        out: [T, heads * width], contiguous, written.
    """
    row = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    at = tl.arange(0, WIDTH)
    inside = at < width
    value = tl.load(x + row * x_stride + head * width + at, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / width + eps)
    gamma = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + OFFSET
    y = wide * scale * gamma
    if GATED:
        z = tl.load(gate + row * gate_stride + head * width + at, mask=inside, other=0.0)
        z = z.to(tl.float32)
        y *= z / (1.0 + tl.exp(-z))
    tl.store(out + (row * heads + head) * width + at, y.to(out.dtype.element_ty), mask=inside)


def rms_norm_plain(x: Tensor, weight: Tensor, offset: int, eps: float) -> Tensor:
    """Twin of `rms_norm`: fp32 inside (fp64 for fp64), x's dtype outside."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (offset + weight.to(wide.dtype))).to(x.dtype)


def gated_rms_norm_plain(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Twin of `gated_rms_norm`; x, gate [T, heads * width], weight [width]."""
    heads = x.reshape(-1, len(weight))
    wide = heads if x.dtype == torch.float64 else heads.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    z = gate.reshape(-1, len(weight)).to(wide.dtype)
    return (normed * weight.to(wide.dtype) * silu(z)).to(x.dtype).reshape(x.shape)


def rms_norm(x: Tensor, weight: Tensor, offset: int, eps: float, out: Tensor) -> None:
    """Write norm(x) to ``out``; both [T, d], x's rows any distance apart, out contiguous.

    Raises:
        ValueError: A shape, dtype or layout is not as above.
    """
    _check(x, weight, out, len(weight))
    _launch(x, weight, None, out, offset, eps)


def repeated_rms_norm(out: Tensor, offset: int, eps: float) -> Callable[[Tensor, Tensor], None]:
    """`rms_norm` of contiguous tensors of ``out``'s shape and dtype: looked up once.

    Returns what launches it for x and weight.
    """
    rows, width = out.shape
    padded = triton.next_power_of_2(width)
    options = {
        "OFFSET": offset, "GATED": False, "WIDTH": padded,
        "num_warps": _warps(padded),
    }  # fmt: skip
    launch = Repeated(_rms_norm, (rows,), options)

    def run(x: Tensor, weight: Tensor) -> None:
        _check(x, weight, out, width, contiguous=True)
        with torch.cuda.device_of(x):
            launch(x, width, weight, x, 0, out, 1, width, eps)

    return run


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float, out: Tensor) -> None:
    """Write norm(x) * silu(gate) to ``out``, head by head.

    Args:
        x, gate: [T, heads * V], rows any distance apart.
        weight: [V], fp32 or x's dtype.
        eps: Added to the mean square.
        out: [T, heads * V], contiguous.

    Raises:
        ValueError: A shape, dtype or layout is not as above.
    """
    _check(x, weight, out, out.shape[-1])
    _check(gate, weight, out, out.shape[-1])
    _launch(x, weight, gate, out, 0, eps)


def _launch(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    out: Tensor,
    offset: int,
    eps: float,
) -> None:
    width = len(weight)
    heads = out.shape[-1] // width
    padded = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):
        _rms_norm[(len(x) * heads,)](
            x, x.stride(0), weight, x if gate is None else gate,
            0 if gate is None else gate.stride(0), out, heads, width, eps,
            OFFSET=offset, GATED=gate is not None, WIDTH=padded, num_warps=_warps(padded),
        )  # fmt: skip


def _warps(padded: int) -> int:
    return max(1, min(8, padded // 512))


def _check(x: Tensor, weight: Tensor, out: Tensor, width: int, contiguous: bool = False) -> None:
    if (
        x.ndim != 2
        or x.shape != out.shape
        or x.shape[1] != width
        or width % len(weight)
        or x.stride(1) != 1
        or not out.is_contiguous()
        or (contiguous and not x.is_contiguous())
        or x.dtype != out.dtype
    ):
        raise ValueError(
            f"rows must be [T, {width}] of one dtype with adjacent columns; got {list(x.shape)} "
            f"{x.dtype} (strides {list(x.stride())}) for {list(out.shape)} {out.dtype}"
        )
