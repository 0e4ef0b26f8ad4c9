# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Greedy determinants in one kernel. Twin: `greedy.determinant`, which takes the same picks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from raincheck_hf.kernels.greedy import KEY_STEP, diagonal_ceiling, square_quanta, start_of
from raincheck_hf.kernels.greedy_grid import (
    best_of_grid,
    candidates,
    check_matrix,
    grid_size,
    key_of,
    launch_options,
    new_board,
    place_of,
)


@triton.jit
def _determinant(
    matrix, start, smallest, slices, columns, board, picks, residuals,
    n, width, budget, scale,
    BLOCKS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Block b owns the residuals and the factor's columns [b·width, (b + 1)·width).

    The factor is written twice. A block reads its own slice of it at every pick, a line of memory
    a row, which its first-level cache holds. The column of the pick belongs to another block, and
    is read around that cache, which may be stale.

    Args:
        matrix: L fp32 [n, n].
        start, smallest: int64 [n], see `greedy.start_of`.
        slices: int32 [BLOCKS, budget, width], scratch: the factor by block.
        columns: int32 [n, budget], scratch: the factor by token.
        board: see `best_of_grid`.
        picks: int64 [budget], written; -1 from where the rank is used up.
        residuals: int64 [n], written.
        scale: fp32, quanta of a residual in 1.
        STEP: `greedy.KEY_STEP`.
    """
    block = tl.program_id(0)
    own = tl.arange(0, COLS)
    col = block * width + own
    live = (own < width) & (col < n)
    slices += block.to(tl.int64) * budget * width
    mine = columns + col.to(tl.int64) * budget
    residual = tl.load(start + col, mask=live, other=0)
    least = tl.load(smallest + col, mask=live, other=0)
    open_ = live
    turn = 0
    going = True
    while going:
        word = tl.max(candidates(residual // STEP, col, open_ & (residual > least)), 0)
        best = best_of_grid(word, board, turn, BLOCKS, "release")
        found = best >= 0
        pick = place_of(best)
        if block == 0:
            tl.store(picks + turn, tl.where(found, pick, -1))
        if found:
            open_ = open_ & (col != pick)
            root = tl.sqrt((key_of(best) * STEP).to(tl.float64))
            row = tl.load(matrix + pick * n + col, mask=live, other=0.0)
            # Summed over rows once, at the end: sums across warps wait for all of them.
            products = tl.zeros([DEPTH, COLS], tl.int64)
            for first in range(0, turn, DEPTH):
                step = first + tl.arange(0, DEPTH)
                past = step < turn
                theirs = tl.load(
                    columns + pick * budget + step, mask=past, other=0, cache_modifier=".cg"
                )
                ours = tl.load(
                    slices + step[:, None] * width + own[None, :],
                    mask=past[:, None] & live[None, :],
                    other=0,
                )
                products += ours.to(tl.int64) * theirs.to(tl.int64)[:, None]
            rest = (row.to(tl.float64) * scale).to(tl.int64) - tl.sum(products, 0)
            new = tl.floor(rest.to(tl.float64) / root + 0.5).to(tl.int32)
            residual -= new.to(tl.int64) * new.to(tl.int64)
            tl.store(slices + turn * width + own, new, mask=live)
            tl.store(mine + turn, new, mask=live)
        turn += 1
        going = found & (turn < budget)
    tl.store(residuals + col, residual, mask=live)


def determinant(
    kernel: Tensor,
    budget: int,
    tolerance: float = 1e-5,
    floor: float = 1e-12,
    ceiling: float | None = None,
    *,
    blocks: int | None = None,
    warps: int = 8,
    depth: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `greedy.determinant`, in one launch; given a ceiling, without waiting for it.

    Memory beside L: twice budget·n words.

    Args:
        kernel: L fp32 [n, n], contiguous, symmetric positive semidefinite.
        budget: 1 ≤ k ≤ n.
        tolerance: smallest residual, relative to the diagonal, that still counts.
        floor: smallest residual that still counts, absolute.
        ceiling: no entry of the diagonal is larger; None looks.
        blocks: size of the grid, a power of two, at most the processors of the GPU.
        warps: of a block.
        depth: rows of the factor in flight at once, a power of two.

    Raises:
        ValueError: a shape, dtype or stride is not as above, or the budget is out of range.
    """
    check_matrix(kernel, "kernel", square=True)
    n, device = len(kernel), kernel.device
    if not 1 <= budget <= n:
        raise ValueError(f"budget must be 1 to {n}, got {budget}")
    blocks = blocks or grid_size(kernel, n)
    width = triton.cdiv(n, blocks)
    cols = triton.next_power_of_2(width)
    picks = torch.full((budget,), -1, dtype=torch.int64, device=device)
    residuals = torch.empty(n, dtype=torch.int64, device=device)
    scale = square_quanta(diagonal_ceiling(kernel) if ceiling is None else ceiling)
    start, smallest = (part.long() for part in start_of(kernel, scale, tolerance, floor))
    with torch.cuda.device_of(kernel):
        _determinant[(blocks,)](
            kernel,
            start,
            smallest,
            torch.empty(blocks, budget, width, dtype=torch.int32, device=device),
            torch.empty(n, budget, dtype=torch.int32, device=device),
            new_board(blocks, device),
            picks,
            residuals,
            n,
            width,
            budget,
            scale,
            BLOCKS=blocks,
            COLS=cols,
            DEPTH=depth or max(16, min(256, 8192 // cols)),
            STEP=KEY_STEP,
            **launch_options(kernel, warps),
        )
    return picks[picks >= 0], (residuals.double() / scale).float()
