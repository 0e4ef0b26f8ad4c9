"""Cosines between tokens, and what is made of them.

On a GPU, rows in half precision are multiplied as they are, into fp32: products of two such numbers
are exact there, so that this is the fp32 result at the speed of half precision. The lengths are
divided out afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raincheck_hf.kernels.choice import fused

_HALF = (torch.bfloat16, torch.float16)


def lengths(rows: Tensor) -> Tensor:
    """Euclidean length of each row, fp32 [n]; never 0."""
    return torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float32).clamp_min(1e-12)


def cosines(rows: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """w_i w_j cos(x_i, x_j) for every pair of rows; fp32 [n, n].

    Args:
        rows: [n, d], any floating dtype.
        weight: w, fp32 [n] or one number.
    """
    factor = weight / lengths(rows)
    if not _half_products(rows):
        unit = rows.float() * factor[:, None]
        return unit @ unit.T
    return scaled(torch.mm(rows, rows.T, out_dtype=torch.float32), factor)


def scaled(product: Tensor, factor: Tensor) -> Tensor:
    """f_i f_j p_ij, in place, of a product fp32 [n, n] and a factor fp32 [n]."""
    if not (product.is_cuda and fused()):
        return product.mul_(factor[:, None]).mul_(factor)
    from raincheck_hf.kernels.similarity import scale_products

    return scale_products(product, factor)


def cosines_between(rows: Tensor, others: Tensor) -> Tensor:
    """cos(x_i, y_j), fp32 [m, n], of rows [m, d] with others [n, d]."""
    if _half_products(rows) and rows.dtype == others.dtype:
        product = torch.mm(rows, others.T, out_dtype=torch.float32)
        return product / lengths(rows)[:, None] / lengths(others)
    unit, unit_others = (x.float() / lengths(x)[:, None] for x in (rows, others))
    return unit @ unit_others.T


def softmax_cosines(rows: Tensor, temperature: float, share: float, out: Tensor) -> None:
    """Write share · softmax_j(cos(x_i, x_j) / temperature), fp32 [n, n].

    Args:
        rows: [n, d], any floating dtype.
        temperature: above 0.
        share: what each row adds up to.
        out: fp32 [n, n], contiguous.
    """
    if _half_products(rows) and fused():
        from raincheck_hf.kernels.similarity import LARGEST, softmax_products

        if len(rows) <= LARGEST:
            product = torch.mm(rows, rows.T, out_dtype=torch.float32)
            softmax_products(product, 1 / lengths(rows), temperature, share, out)
            return
    out.copy_(torch.softmax(cosines(rows, temperature**-0.5), dim=-1)).mul_(share)


def _half_products(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype in _HALF and torch.version.cuda is not None
