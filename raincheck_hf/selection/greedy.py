"""Greedy cores for selectors: one kernel a call on an NVIDIA GPU, the plain loops elsewhere.

`raincheck_hf.kernels.greedy` says what each core does and returns; GREEDY.md beside it says how.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raincheck_hf.kernels import greedy as plain
from raincheck_hf.kernels.choice import by_kernel, plain_loops

__all__ = ["coverage", "determinant", "max_min", "plain_loops", "ranked", "thinned"]


def _fast(matrix: Tensor) -> bool:
    return matrix.dtype == torch.float32 and by_kernel(matrix)


def ranked(picks: Tensor, rest: Tensor) -> Tensor:
    """Scores whose top k are the picks in their order, and whose remainder is ordered by `rest`.

    Args:
        picks: [k] int64, best first; −1 is none.
        rest: [n] finite.

    Returns:
        fp32 [n]: k for the first pick, k − 1 for the next, and so on; at most 0 for all others.
    """
    scores = (rest - rest.max()).float()
    scores = torch.cat([scores, scores.new_zeros(1)])  # a place that −1 points to
    scores[picks] = torch.arange(len(picks), 0, -1, dtype=scores.dtype, device=scores.device)
    return scores[:-1]


def coverage(
    covering: Tensor, budget: int, weight: Tensor | None = None, ceiling: float | None = None
) -> tuple[Tensor, Tensor]:
    """Greedy maximum of Σ_r max(0, max_{j∈T} C_rj), C fp32 [r, n].

    A weight [n] ≥ 0 multiplies a token's gain when tokens are compared. A ceiling, which no
    column's sum exceeds, spares a look at C. The picks do not depend on the implementation.

    Returns:
        picks [k], and the weighted gain [n] fp64 that each token would still bring.
    """
    weight = None if weight is None else weight.double()
    if _fast(covering):
        from raincheck_hf.kernels import greedy_coverage

        return greedy_coverage.coverage(covering.contiguous(), budget, weight, ceiling)
    return plain.coverage(covering, budget, weight, ceiling)


def max_min(distance: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    """Greedy max-min spreading over distances fp32 [n, n].

    The picks do not depend on the implementation.

    Returns:
        picks [k], and the distance [n] of every token to the nearest pick.
    """
    if _fast(distance):
        from raincheck_hf.kernels import greedy_max_min

        if len(distance) <= greedy_max_min.LARGEST:
            return greedy_max_min.max_min(distance.contiguous(), budget)
    return plain.max_min(distance, budget)


def determinant(kernel: Tensor, budget: int, ceiling: float | None = None) -> tuple[Tensor, Tensor]:
    """Greedy maximum of det(L_T), L fp32 [n, n], until its rank is used up.

    A ceiling, which no entry of the diagonal exceeds, spares a look at it. The picks do not depend
    on the implementation.

    Returns:
        picks [k], −1 from where the rank is used up, and the residual [n] of every token.
    """
    if _fast(kernel):
        from raincheck_hf.kernels import greedy_determinant

        return greedy_determinant.determinant(kernel.contiguous(), budget, ceiling=ceiling)
    return plain.determinant(kernel, budget, ceiling=ceiling)


def thinned(similar: Tensor, keep: int, rounds: int, tokens: Tensor | None = None) -> Tensor:
    """Thin tokens [m] (None is all) out, nearest duplicates first, by similarity fp32 [n, n].

    The result does not depend on the implementation.

    Returns:
        int64 [keep], ascending, the tokens left.
    """
    if _fast(similar):
        from raincheck_hf.kernels import greedy_thinning

        return greedy_thinning.thinned(similar.contiguous(), keep, rounds, tokens)
    return plain.thinned(similar, keep, rounds, tokens)
