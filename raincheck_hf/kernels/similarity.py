# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Dot products to cosines, and to their softmax, in one pass. Twins: `selection.similarity`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 1 << 15
"""Columns of a softmax that one program can keep in its registers."""

_LOG2_E = 1.4426950408889634


@triton.jit
def _scaled(product, factor, n, WIDE: tl.constexpr):
    """p_ij ← (p_ij f_i) f_j; WIDE columns of a row of [n, n] a program."""
    row = tl.program_id(0)
    col = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    place = product + row.to(tl.int64) * n + col
    scaled = tl.load(place, mask=col < n) * tl.load(factor + row)
    tl.store(place, scaled * tl.load(factor + col, mask=col < n), mask=col < n)


@triton.jit
def _softmax(product, factor, out, n, scale, share, WIDE: tl.constexpr):
    """out_ij = share · softmax_j(scale·f_i f_j p_ij); a row of [n, n] a program."""
    row = tl.program_id(0)
    col = tl.arange(0, WIDE)
    both = tl.load(factor + row) * tl.load(factor + col, mask=col < n, other=0.0)
    place = row.to(tl.int64) * n + col
    score = tl.load(product + place, mask=col < n, other=0.0) * both * scale
    score = tl.where(col < n, score, -float("inf"))
    power = tl.exp2(score - tl.max(score, 0))
    tl.store(out + place, power * (share / tl.sum(power, 0)), mask=col < n)


def scale_products(product: Tensor, factor: Tensor) -> Tensor:
    """p_ij ← f_i f_j p_ij in place, rounded as by two multiplications in PyTorch.

    Args:
        product: fp32 [n, n], contiguous.
        factor: fp32 [n].

    Returns:
        `product`.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    _check(product, factor)
    n = len(product)
    wide = min(1024, triton.next_power_of_2(n))
    with torch.cuda.device_of(product):
        _scaled[(n, triton.cdiv(n, wide))](product, factor, n, WIDE=wide)
    return product


def softmax_products(
    product: Tensor, factor: Tensor, temperature: float, share: float, out: Tensor
) -> Tensor:
    """share · softmax_j(f_i f_j p_ij / temperature).

    Args:
        product: fp32 [n, n], contiguous, n ≤ LARGEST.
        factor: fp32 [n].
        temperature: above 0.
        share: what each row adds up to.
        out: fp32 [n, n], contiguous, written; may be `product`.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    _check(product, factor)
    _check(out, factor)
    n = len(product)
    if n > LARGEST or temperature <= 0:
        raise ValueError(f"n must be at most {LARGEST}, temperature above 0: {n}, {temperature}")
    wide = triton.next_power_of_2(n)
    options = {"num_warps": max(4, min(32, wide // 512))} if product.is_cuda else {}
    with torch.cuda.device_of(product):
        _softmax[(n,)](product, factor, out, n, _LOG2_E / temperature, share, WIDE=wide, **options)
    return out


def _check(matrix: Tensor, factor: Tensor) -> None:
    n = len(factor)
    fits = matrix.shape == (n, n) and factor.shape == (n,) and n > 0
    types = {matrix.dtype, factor.dtype}
    if not fits or types != {torch.float32} or not matrix.is_contiguous():
        raise ValueError(
            f"need contiguous fp32 [n, n] and fp32 [n], got {matrix.dtype} {list(matrix.shape)} "
            f"and {factor.dtype} {list(factor.shape)}"
        )
