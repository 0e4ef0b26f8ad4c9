"""Cosines between all tokens."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


def lengths(rows: Tensor) -> Tensor:
    """Euclidean length of each row, fp32 [n]; never 0."""
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32).clamp_min(1e-12)


def cosines(rows: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """w_i w_j cos(x_i, x_j) for every pair of rows; fp32 [n, n].

    On a GPU, rows in half precision are multiplied as they are, into fp32: products of two such
    numbers are exact there, so that this is the fp32 result at the speed of half precision. The
    lengths are divided out afterwards.

    Args:
        rows: [n, d], any floating dtype.
        weight: w, fp32 [n] or one number.
    """
    if rows.is_cuda and rows.dtype in _HALF and torch.version.cuda is not None:
        factor = weight / lengths(rows)
        product = torch.mm(rows, rows.T, out_dtype=torch.float32)
        return product.mul_(factor[:, None]).mul_(factor)
    unit = rows.float() * (weight / lengths(rows))[:, None]
    return unit @ unit.T
