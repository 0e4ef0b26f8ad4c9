"""Greedy selection over matrices. Plain PyTorch: the twins of the kernels beside this file.

Each returns the picks in the order taken, int64 [k], and a value per token that ranks what is left.
Equal candidates are taken by index. Every pick reads a value back to the host. GREEDY.md has the
derivations.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ROWS_AT_ONCE = 1024

KEY_STEP = 2**12
"""Residuals of `determinant`, below 2^53, are compared in steps of this size: keys of 41 bits."""


def quanta(ceiling: float) -> float:
    """How gains are counted: in whole multiples of a power of two, about ceiling · 2^-41.

    Whole numbers add up to the same sum in any order. So gains are exact from then on, what is
    covered entirely gains exactly nothing, and every implementation breaks the same ties.

    Args:
        ceiling: no gain is larger.

    Returns:
        Quanta in 1, a power of two; gains are below 2^41 of them.
    """
    return math.ldexp(1.0, min(126, 40 - math.frexp(ceiling)[1]))


def counted(values: Tensor, scale: float) -> Tensor:
    """fp32 values in whole quanta, int64, rounded towards zero."""
    return (values * scale).to(torch.int64)


def relative(weight: Tensor | None) -> Tensor | None:
    """Weights fp64 [n] in [0, 1]: gains keep their range."""
    return None if weight is None else weight / weight.max().clamp_min(1e-300)


def remaining(gain: Tensor, scale: float, weight: Tensor | None) -> Tensor:
    """Weighted gains fp64 [n] from quanta; NaN where a gain is negative, which marks a NaN."""
    value = torch.where(gain < 0, torch.nan, gain.double() / scale)
    return value if weight is None else value * weight


def coverage(
    covering: Tensor, budget: int, weight: Tensor | None = None, ceiling: float | None = None
) -> tuple[Tensor, Tensor]:
    """Maximise f(T) = Σ_r max(0, max_{j∈T} C_rj), a monotone submodular function, greedily.

    The gain of a token is kept up to date instead of being summed anew: a pick changes only the
    rows that it covers better, and clamp(C_rj, old, new) − old is what token j loses in such a row.
    A row improves rarely, so that the sum over all picks is a few passes over C, not k of them.

    Args:
        covering: C fp32 [r, n], how well token j covers row r.
        budget: k ≤ n.
        weight: fp64 [n] ≥ 0, multiplies a token's gain when tokens are compared; None is 1.
        ceiling: no column's positive part sums to more; None looks.

    Returns:
        picks [k], and the weighted gain [n] fp64 that each token would still bring; NaN where a
        column holds NaN.
    """
    scale = quanta(ceiling_of(covering) if ceiling is None else ceiling)
    gain = torch.zeros(covering.shape[1], dtype=torch.int64, device=covering.device)
    for rows in covering.split(_ROWS_AT_ONCE):
        gain += counted(rows.clamp_min(0), scale).sum(0)
    covered = covering.new_zeros(len(covering))
    taken = torch.zeros_like(gain, dtype=torch.bool)
    share = relative(weight)
    picks: list[int] = []
    while len(picks) < budget:
        key = gain if share is None else (gain.double() * share).to(torch.int64)
        pick = int(key.masked_fill(taken, -1).argmax())
        picks.append(pick)
        taken[pick] = True
        column = covering[:, pick]
        improved = (column > covered).nonzero().squeeze(1)
        for rows in improved.split(_ROWS_AT_ONCE):
            old, new = (counted(part[rows, None], scale) for part in (covered, column))
            gain -= (counted(covering[rows], scale).clamp(old, new) - old).sum(0)
        covered[improved] = column[improved]
    gain[covering.isnan().any(0)] = -1
    return torch.tensor(picks, device=covering.device), remaining(gain, scale, weight)


def ceiling_of(covering: Tensor) -> float:
    """A bound for the positive part of every column's sum; reads a value back to the host."""
    return max(1e-30, len(covering) * float(covering.nan_to_num(0, 0, 0).amax()))


def max_min(distance: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Spread k points: each is the one farthest from those already chosen.

    The first is the point whose nearest other point is farthest away.

    Args:
        distance: fp32 [n, n] symmetric.
        budget: k ≤ n.

    Returns:
        picks [k], and the distance [n] of every token to the nearest pick.
    """
    others = to_others(distance)
    nearest = torch.full_like(others, torch.inf)
    taken = torch.zeros_like(others, dtype=torch.bool)
    picks: list[int] = []
    while len(picks) < budget:
        candidates = nearest if picks else others
        pick = int(candidates.masked_fill(taken, -torch.inf).argmax())
        picks.append(pick)
        taken[pick] = True
        nearest = torch.minimum(nearest, distance[pick])
    return torch.tensor(picks, device=distance.device), nearest


def to_others(distance: Tensor) -> Tensor:
    """Distance [n] of each point to its nearest other point; infinite for a single point."""
    return distance.clone().fill_diagonal_(torch.inf).amin(1)


def determinant(
    kernel: Tensor,
    budget: int,
    tolerance: float = 1e-5,
    floor: float = 1e-12,
    ceiling: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Maximise det(L_T) greedily, by one row of the Cholesky factor a pick (Chen et al. 2018).

    The residual of a token is the factor det(L_{T+j}) / det(L_T) that it would bring. Once it has
    fallen below `tolerance` of its start, it is rounding, and the token lies in the span of the
    picks: nothing tells such tokens apart, and the greedy ends when no other is left.

    In fp32, residuals drift by 1e-5 and more over a thousand picks, near-ties fall either way, and
    what follows a near-tie is another selection. So the factor holds whole numbers of 26 bits.
    Their products stay below 2^53, where fp64 adds whole numbers exactly, in any order.

    Args:
        kernel: L fp32 [n, n], symmetric positive semidefinite.
        budget: k ≤ n.
        tolerance: smallest residual, relative to the diagonal, that still counts.
        floor: smallest residual that still counts, absolute.
        ceiling: no entry of the diagonal is larger; None looks.

    Returns:
        picks [k], −1 from where the rank of L is used up, and the residual fp32 [n].
    """
    scale = square_quanta(diagonal_ceiling(kernel) if ceiling is None else ceiling)
    residual, smallest = start_of(kernel, scale, tolerance, floor)
    factor = torch.zeros(budget, len(kernel), dtype=torch.float64, device=kernel.device)
    taken = torch.zeros_like(residual, dtype=torch.bool)
    picks = [-1] * budget
    for row in range(budget):
        closed = taken | (residual <= smallest)
        candidates = (residual / KEY_STEP).floor().masked_fill(closed, -1)
        pick = int(candidates.argmax())
        if not candidates[pick] >= 0:
            break
        picks[row] = pick
        taken[pick] = True
        above = factor[:row]
        rest = (kernel[pick].double() * scale).trunc() - above[:, pick] @ above
        factor[row] = (rest * (1 / (candidates[pick] * KEY_STEP).sqrt()) + 0.5).floor()
        residual = residual - factor[row].square()
    found = torch.tensor(picks, dtype=torch.int64, device=kernel.device)
    return found, (residual / scale).float()


def square_quanta(ceiling: float) -> float:
    """Quanta of a residual in 1, a power of two: at most 2^52 in the ceiling.

    The factor's quantum is the square root of a residual's. By Cauchy and Schwarz no sum of
    products of the factor, nor any part of one, exceeds the largest entry of the diagonal.
    """
    return math.ldexp(1.0, min(126, 52 - math.frexp(ceiling)[1]))


def diagonal_ceiling(kernel: Tensor) -> float:
    """The largest entry of the diagonal; reads a value back to the host."""
    return max(1e-30, float(kernel.diagonal().nan_to_num(0, 0, 0).amax()))


def start_of(kernel: Tensor, scale: float, tolerance: float, floor: float) -> tuple[Tensor, Tensor]:
    """Residuals before the first pick, and the smallest that count: whole numbers, fp64 [n].

    Nothing counts where the diagonal is no number, negative, or far above its ceiling.
    What counts is compared by a key of 1 or more. And a token, once picked, never counts again: the
    root of its residual, rounded to whole quanta, leaves at most that root of it.
    """
    residual = (kernel.diagonal().double() * scale).trunc()
    residual = residual.where((residual >= 0) & (residual <= 2**53), 0)
    smallest = (residual * tolerance).clamp_min(floor * scale)
    return residual, torch.maximum(smallest, 2 * residual.sqrt()).clamp(KEY_STEP, 2**53).floor()


def thinned(similar: Tensor, keep: int, rounds: int, tokens: Tensor | None = None) -> Tensor:
    """Thin tokens out until `keep` are left, nearest duplicates first.

    Each round deals the remaining tokens alternately into two hands and drops, from the first
    hand, those most similar to some token of the second. A token and its only duplicate can fall
    into one hand; dealing anew after each round parts them.

    Args:
        similar: fp32 [n, n], symmetric.
        keep: 1 ≤ keep ≤ m.
        rounds: about how many to need.
        tokens: int64 [m], ascending, below n: those to thin out; None is all.

    Returns:
        int64 [keep], ascending, the tokens left.
    """
    left = torch.arange(len(similar), device=similar.device) if tokens is None else tokens
    step = per_round(len(left), keep, rounds)
    while len(left) > keep:
        first, second = left[0::2], left[1::2]
        nearest = similar[first[:, None], second].amax(1)
        order = torch.sort(nearest, descending=True, stable=True).indices
        drop = min(step, len(left) - keep, len(first))
        left = torch.cat([first[order[drop:]], second]).sort().values
    return left


def per_round(n: int, keep: int, rounds: int) -> int:
    """Tokens to drop in a round."""
    return max(1, -(-(n - keep) // rounds))
