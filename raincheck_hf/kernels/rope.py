"""Queries and keys of an attention layer before the attention. Plain PyTorch: the kernels' twins.

`rope_kernels` has the same two functions on a device; ATTENTION.md has the derivation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raincheck_hf.kernels.attention import Lengths


def rope_table(
    positions: Tensor, inv_freq: Tensor, axis: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every row and frequency.

    Args:
        positions: int64 [3, T], M-RoPE positions (time, height, width).
        inv_freq: fp32 [R], the rotary frequencies.
        axis: int [R] of 0, 1, 2: which position a frequency turns with.
        scaling: the attention scaling of the rope type, 1 for plain RoPE.
        dtype: of the model, which rounds the table to it.

    Returns:
        cos and sin [T, R], fp32 (fp64 for fp64 frequencies), rounded to `dtype`.
    """
    angles = positions[axis.long()].T.contiguous().to(inv_freq.dtype) * inv_freq
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return cos.to(dtype).to(inv_freq.dtype), sin.to(dtype).to(inv_freq.dtype)


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Lengths,
    keys: Tensor,
    values: Tensor,
    *,
    offset: int,
    eps: float,
    capacity: int | None = None,
) -> Tensor:
    """Normalise q and k, rotate them, write k and v to their slots.

    Rounds to the dtype wherever the models' own layers do.

    Args:
        q: [T, Hq, dim], projections of T = capacity + 1 rows.
        k: [T, H, dim].
        v: [T, H, dim].
        q_weight: [dim], of the norm.
        k_weight: [dim].
        cos: [T, R], see `rope_table`; dims 0 to 2R are rotated, the others pass.
        sin: [T, R].
        lengths: of the pass.
        keys: [H, slots, dim], written in the slots of rows in use.
        values: [H, slots, dim], likewise.
        offset: 0 where the norm multiplies by w, 1 where by 1 + w.
        eps: of the norm.
        capacity: index of the decode row; None is T − 1.

    Returns:
        The queries [T, Hq, dim]; zero in rows not in use.
    """
    rows, slots = lengths.used(len(q) - 1 if capacity is None else capacity)
    rows, slots = rows[: len(q)], slots[: len(q)]
    keys[:, slots] = _turned(k[rows], k_weight, cos[rows], sin[rows], offset, eps).transpose(0, 1)
    values[:, slots] = v[rows].transpose(0, 1)
    queries = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    queries[rows] = _turned(q[rows], q_weight, cos[rows], sin[rows], offset, eps)
    return queries


def _turned(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, offset: int, eps: float) -> Tensor:
    """[T, heads, dim] normalised and rotated."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset:
        normed = (unit * (offset + weight.to(wide.dtype))).to(x.dtype)
    else:
        normed = weight * unit.to(x.dtype)
    half = cos.shape[-1]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    first, second, rest = normed[..., :half], normed[..., half : 2 * half], normed[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
