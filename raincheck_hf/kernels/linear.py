"""Linear layers for 1 to 64 rows: plain twins, and the launches of `stream`.

Shapes: T rows (at most 64), K inputs, N outputs. Weights are the model's own, [N_i, K].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch.nn.functional import silu

from raincheck_hf.kernels import stream
from raincheck_hf.kernels.norm import rms_norm_plain

MOST_ROWS = 64
MOST_WEIGHTS = 4


@dataclass(frozen=True)
class Norm:
    """The RMSNorm in front of a linear layer.

    Attributes:
        weight: [K].
        offset: Added to the weight: 0 or 1.
        eps: Added to the mean square.
    """

    weight: Tensor
    offset: int
    eps: float


def linear_plain(
    x: Tensor, weights: Sequence[Tensor], norm: Norm | None = None, residual: Tensor | None = None
) -> Tensor:
    """Twin of `linear`: norm(x) [W_0; W_1; ...]^T + residual, [T, sum of N_i]."""
    h = _normed(x, norm)
    y = torch.cat([h @ weight.T for weight in weights], dim=-1)
    return y if residual is None else y + residual


def swiglu_plain(x: Tensor, gate: Tensor, up: Tensor, norm: Norm | None = None) -> Tensor:
    """Twin of `swiglu`: silu(norm(x) G^T) * (norm(x) U^T), [T, N]."""
    h = _normed(x, norm)
    return silu(h @ gate.T) * (h @ up.T)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else rms_norm_plain(x, norm.weight, norm.offset, norm.eps)


class Scratch:
    """Partial sums of launches that split K; shared by launches that run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.partial = torch.empty(0, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(0, dtype=torch.int32, device=device)

    def fit(self, partial: int, blocks: int) -> None:
        """Have at least so many elements; not inside a capture."""
        if self.partial.numel() < partial:
            self.partial = torch.empty(partial, dtype=torch.float32, device=self._device)
        if self.arrived.numel() < blocks:
            self.arrived = torch.zeros(blocks, dtype=torch.int32, device=self._device)


def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    out: Tensor,
    scratch: Scratch,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> None:
    """Write norm(x) [W_0; W_1; ...]^T + residual to ``out``, in one launch.

    Args:
        x: [T, K], contiguous, T ≤ 64. With ``norm``, T = 1: more rows are cheaper normed once.
        weights: One to four [N_i, K], contiguous, of x's dtype.
        out: [T, sum of N_i], contiguous.
        scratch: For partial sums.
        norm: In front.
        residual: [T, sum of N_i], contiguous; may be ``out``.

    Raises:
        ValueError: A shape, dtype or layout is not as above.
    """
    _check(x, weights, out, norm, residual)
    if not 1 <= len(weights) <= MOST_WEIGHTS:
        raise ValueError(f"1 to {MOST_WEIGHTS} weights; got {len(weights)}")
    _launch(x, list(weights), out, scratch, norm, residual, swiglu=False)


def swiglu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    out: Tensor,
    scratch: Scratch,
    *,
    norm: Norm | None = None,
) -> None:
    """Write silu(norm(x) G^T) * (norm(x) U^T) to ``out`` [T, N], in one launch; see `linear`.

    Raises:
        ValueError: A shape, dtype or layout is not as in `linear`, or gate and up differ in shape.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate {list(gate.shape)} and up {list(up.shape)} must have one shape")
    _check(x, [gate], out, norm, None)
    _check(x, [up], out, norm, None)
    _launch(x, [gate, up], out, scratch, norm, None, swiglu=True)


def _launch(
    x: Tensor,
    weights: list[Tensor],
    out: Tensor,
    scratch: Scratch,
    norm: Norm | None,
    residual: Tensor | None,
    *,
    swiglu: bool,
) -> None:
    rows, width = x.shape
    filled = weights + weights[:1] * (MOST_WEIGHTS - len(weights))
    counts = [len(weight) for weight in weights] + [0] * (MOST_WEIGHTS - len(weights))
    columns = counts[:1] if swiglu else counts
    shared = {
        "OFFSET": norm.offset if norm else 0,
        "K": width,
        "NORM": norm is not None,
        "RESIDUAL": residual is not None,
        "SWIGLU": swiglu,
    }
    gamma, eps = (norm.weight, norm.eps) if norm else (x, 0.0)
    before = out if residual is None else residual
    with torch.cuda.device_of(x):
        if rows == 1:
            one = one_row(width, sum(columns))
            blocks = sum(triton.cdiv(count, one["BN"]) for count in columns)
            stream._row[(blocks,)](x, gamma, before, out, *filled, *counts, eps, **shared, **one)
            return
        many = many_rows(rows, width, sum(columns), swiglu, x.element_size())
        blocks = sum(triton.cdiv(count, many["BN"]) for count in columns)
        tile = many["BM"] * (many["BN"] * (2 if swiglu else 1) + 1)
        if many["SPLIT"] > 1:
            scratch.fit(blocks * many["SPLIT"] * tile, blocks)
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        stream._rows[(blocks, many["SPLIT"])](
            x, width, gamma, before, out, out.shape[1], scratch.partial, scratch.arrived,
            *filled, *counts, rows, eps, PRECISION=precision, **shared, **many,
        )  # fmt: skip


def one_row(width: int, columns: int) -> dict[str, int]:
    """Launch parameters for one row; chosen on an H200, see STREAM.md."""
    wide = _power_below(width, 256)
    return {"BN": 16, "BK": wide, "STAGES": 3 if columns > 16384 else 5, "num_warps": 4}


def many_rows(rows: int, width: int, columns: int, swiglu: bool, itemsize: int) -> dict[str, int]:
    """Launch parameters for 2 to 64 rows; chosen on an H200, see STREAM.md."""
    padded = max(16, triton.next_power_of_2(rows))
    block = 32 if swiglu and padded <= 32 else 64
    wide = _power_below(width, 128)
    split = 1
    if width % wide == 0 and width >= 8 * wide and triton.cdiv(columns, block) < 132:
        split = 4 if width > 8192 and padded == 16 else 2
    return {
        "BM": padded, "BN": block, "BK": wide, "SPLIT": split,
        "STAGES": 4 if itemsize == 2 else 2,  # what shared memory holds
        "num_warps": 4,
    }  # fmt: skip


def _power_below(width: int, most: int) -> int:
    return max(16, min(most, triton.next_power_of_2(width)))


def _check(
    x: Tensor,
    weights: Sequence[Tensor],
    out: Tensor,
    norm: Norm | None,
    residual: Tensor | None,
) -> None:
    rows, width = x.shape
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"1 to {MOST_ROWS} rows; got {rows}")
    if norm is not None and rows != 1:
        raise ValueError(f"a norm is joined to one row only; got {rows}")
    columns = sum(len(weight) for weight in weights)
    wanted: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "x": (x, (rows, width)),
        "out": (out, (rows, columns)),
    }
    for i, weight in enumerate(weights):
        wanted[f"weight {i}"] = (weight, (len(weight), width))
    if norm is not None:
        wanted["norm weight"] = (norm.weight, (width,))
    if residual is not None:
        wanted["residual"] = (residual, (rows, columns))
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape or not tensor.is_contiguous() or tensor.dtype != x.dtype:
            raise ValueError(
                f"{name} must be {list(shape)}, contiguous, {x.dtype}; got {list(tensor.shape)}, "
                f"strides {list(tensor.stride())}, {tensor.dtype}"
            )
