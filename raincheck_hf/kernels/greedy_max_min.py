# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Greedy max-min spreading in one kernel of one block. Twin: `greedy.max_min`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from raincheck_hf.kernels.greedy import to_others
from raincheck_hf.kernels.greedy_grid import check_matrix

LARGEST = 1 << 16
"""Tokens whose distances one block can keep in its registers."""


@triton.jit
def _max_min(distance, others, picks, nearest_at, n, budget, N: tl.constexpr):
    """One block keeps every token's distance to the picks; a pick reads one row.

    Args:
        distance: fp32 [n, n].
        others: fp32 [n], see `to_others`.
        picks: int64 [budget], written.
        nearest_at: fp32 [n], written.
    """
    col = tl.arange(0, N)
    live = col < n
    open_ = live
    candidates = tl.load(others + col, mask=live, other=0.0)
    nearest = tl.full([N], float("inf"), tl.float32)
    for turn in range(budget):
        pick = tl.argmax(tl.where(open_, candidates, -float("inf")), 0)
        open_ = open_ & (col != pick)
        tl.store(picks + turn, pick.to(tl.int64))
        row = tl.load(distance + pick.to(tl.int64) * n + col, mask=live, other=0.0)
        nearest = tl.minimum(nearest, row)
        candidates = nearest
    tl.store(nearest_at + col, nearest, mask=live)


def max_min(distance: Tensor, budget: int, *, warps: int | None = None) -> tuple[Tensor, Tensor]:
    """As `greedy.max_min`, in one launch and without waiting for it; the same picks.

    Args:
        distance: fp32 [n, n], contiguous, n ≤ LARGEST.
        budget: 1 ≤ k ≤ n.
        warps: of the block.

    Raises:
        ValueError: a shape, dtype or stride is not as above, or the budget is out of range.
    """
    check_matrix(distance, "distance", square=True)
    n = len(distance)
    if not 1 <= budget <= n or n > LARGEST:
        raise ValueError(f"budget must be 1 to {n}, and n at most {LARGEST}; got {budget}, {n}")
    padded = triton.next_power_of_2(n)
    others = to_others(distance)
    picks = torch.empty(budget, dtype=torch.int64, device=distance.device)
    nearest = torch.empty_like(others)
    options = {"num_warps": warps or max(4, min(32, padded // 128))} if distance.is_cuda else {}
    with torch.cuda.device_of(distance):
        _max_min[(1,)](distance, others, picks, nearest, n, budget, N=padded, **options)
    return picks, nearest
