"""Greedy cores: pure functions over matrices, the plain twins of any faster version.

Each returns the picks in the order taken, int64 [k], and a value per token that ranks what is left.
Equal candidates are taken by index. Every pick reads a value back to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS_AT_ONCE = 1024


def ranked(picks: Tensor, rest: Tensor) -> Tensor:
    """Scores whose top k are the picks in their order, and whose remainder is ordered by `rest`.

    Args:
        picks: [k] int64, best first.
        rest: [n] finite.

    Returns:
        fp32 [n]: k ... 1 for the picks, at most 0 for all others.
    """
    scores = (rest - rest.max()).float()
    scores[picks] = torch.arange(len(picks), 0, -1, dtype=scores.dtype, device=scores.device)
    return scores


def coverage(covering: Tensor, budget: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Maximise f(T) = Σ_r max(0, max_{j∈T} C_rj), a monotone submodular function, greedily.

    The gain of a token is kept up to date instead of being summed anew: a pick changes only the
    rows that it covers better, and clamp(C_rj, old, new) − old is what token j loses in such a row.
    A row improves rarely, so that the sum over all picks is a few passes over C, not k of them.

    Args:
        covering: C [r, n], how well token j covers row r.
        budget: k ≤ n.
        weight: [n] ≥ 0, multiplies a token's gain when tokens are compared; None is 1.

    Returns:
        picks [k], and the weighted gain [n] fp64 that each token would still bring.
    """
    n = covering.shape[1]
    gain = covering.clamp_min(0).sum(0, dtype=torch.float64)
    # Below this a gain is what rounding left of zero, and must not break a tie.
    noise = float(gain.max()) * 1e-12
    covered = covering.new_zeros(covering.shape[0])
    taken = torch.zeros(n, dtype=torch.bool, device=covering.device)
    picks: list[int] = []
    while len(picks) < budget:
        pick = int(_weighted(gain, weight).masked_fill(taken, -torch.inf).argmax())
        picks.append(pick)
        taken[pick] = True
        column = covering[:, pick]
        improved = (column > covered).nonzero().squeeze(1)
        for rows in improved.split(_ROWS_AT_ONCE):
            old, new = covered[rows, None].double(), column[rows, None].double()
            gain -= (covering[rows].double().clamp(old, new) - old).sum(0)
        covered[improved] = column[improved]
        gain[gain < noise] = 0
    return torch.tensor(picks, device=covering.device), _weighted(gain, weight)


def _weighted(gain: Tensor, weight: Tensor | None) -> Tensor:
    return gain if weight is None else gain * weight


def max_min(distance: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Spread k points: each is the one farthest from those already chosen.

    The first is the point whose nearest other point is farthest away.

    Args:
        distance: [n, n] symmetric.
        budget: k ≤ n.

    Returns:
        picks [k], and the distance [n] of every token to the nearest pick.
    """
    others = distance.clone().fill_diagonal_(torch.inf).amin(1)
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


def determinant(
    kernel: Tensor, budget: int, tolerance: float = 1e-5, floor: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """Maximise det(L_T) greedily, by one row of the Cholesky factor a pick (Chen et al. 2018).

    The residual of a token is the factor det(L_{T+j}) / det(L_T) that it would bring. Once it has
    fallen below `tolerance` of its start, it is fp32 rounding, and the token lies in the span of
    the picks: nothing tells such tokens apart, and the greedy ends when no other is left.

    Args:
        kernel: L [n, n], symmetric positive semidefinite.
        budget: k ≤ n.
        tolerance: smallest residual, relative to the diagonal, that still counts.
        floor: smallest residual that still counts, absolute.

    Returns:
        picks, k of them or as many as the rank of L allows, and the residual [n].
    """
    residual = kernel.diagonal().clone()
    smallest = (residual * tolerance).clamp_min(floor)
    factor = kernel.new_zeros(budget, kernel.shape[0])
    taken = torch.zeros_like(residual, dtype=torch.bool)
    picks: list[int] = []
    for row in range(budget):
        candidates = residual.masked_fill(taken | (residual <= smallest), -torch.inf)
        pick = int(candidates.argmax())
        if candidates[pick] == -torch.inf:
            break
        picks.append(pick)
        taken[pick] = True
        above = factor[:row]
        factor[row] = (kernel[pick] - above[:, pick] @ above) / residual[pick].sqrt()
        residual = residual - factor[row].square()
    return torch.tensor(picks, dtype=torch.long, device=kernel.device), residual
