# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Greedy maximum coverage in one kernel. Twin: `greedy.coverage`, which takes the same picks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from raincheck_hf.kernels.greedy import ceiling_of, quanta, relative, remaining
from raincheck_hf.kernels.greedy_grid import (
    best_of_grid,
    candidates,
    check_matrix,
    grid_size,
    launch_options,
    new_board,
    place_of,
)


@triton.jit
def _loss(
    by_row, by_column, covered, places, scale, pick, item, count, col, live, r, n,
):  # fmt: skip
    """What columns lose in listed rows, int64 [COLS] quanta; marks these rows as covered."""
    # The list is read before its length is known: what lies behind its end is some other row.
    place = tl.load(places + item)
    inside = item < count
    old = tl.load(covered + place, mask=inside, other=0.0)
    new = tl.load(by_column + pick * r + place, mask=inside, other=0.0)
    tile = tl.load(
        by_row + place.to(tl.int64)[:, None] * n + col[None, :],
        mask=inside[:, None] & live[None, :],
        other=0.0,
    )
    low = (old * scale).to(tl.int64)[:, None]
    high = (new * scale).to(tl.int64)[:, None]
    reached = tl.minimum(tl.maximum((tile * scale).to(tl.int64), low), high)
    loss = tl.sum(reached - low, 0)
    # Warps hold copies of the list: none may store before all have loaded.
    tl.debug_barrier()
    tl.store(covered + place, new, mask=inside)
    return loss


@triton.jit
def _coverage(
    by_row, by_column, weight, covered, places, counters, board, picks, gains,
    r, n, width, budget, scale,
    WEIGHTED: tl.constexpr, BLOCKS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    COLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Block b owns the gains of columns [b·width, (b + 1)·width) and a copy of what is covered.

    Args:
        by_row: C fp32 [r, n].
        by_column: its transpose, contiguous.
        weight: fp64 [n] in [0, 1], read if WEIGHTED.
        covered: fp32 [BLOCKS, r], zero.
        places: int32 [BLOCKS, r + CHUNK], scratch, zero.
        counters: int32 [BLOCKS, 2], zero.
        board: see `best_of_grid`.
        picks: int64 [budget], written.
        gains: int64 [n], written: what each column would still bring, in quanta; -1 for a column
            with NaN.
        scale: fp32, quanta in 1.
        HEAD, TAIL: powers of two that add up to r or more; two, as one may be nearly twice r.
    """
    block = tl.program_id(0)
    own = tl.arange(0, COLS)
    col = block * width + own
    live = (own < width) & (col < n)
    head = tl.arange(0, HEAD)
    tail = HEAD + tl.arange(0, TAIL)
    covered += block.to(tl.int64) * r
    places += block.to(tl.int64) * (r + CHUNK)
    counters += block * 2
    chunk = tl.arange(0, CHUNK)
    if WEIGHTED:
        factor = tl.load(weight + col, mask=live, other=0.0)

    gain = tl.zeros([COLS], tl.int64)
    invalid = tl.zeros([COLS], tl.int32)
    for start in range(0, r, CHUNK):
        at = start + chunk
        tile = tl.load(
            by_row + at.to(tl.int64)[:, None] * n + col[None, :],
            mask=(at < r)[:, None] & live[None, :],
            other=0.0,
        )
        gain += tl.sum((tl.maximum(tile, 0.0) * scale).to(tl.int64), 0)
        invalid = tl.maximum(invalid, tl.max((tile != tile).to(tl.int32), 0))

    open_ = live
    for turn in range(budget):
        key = gain
        if WEIGHTED:
            key = (gain.to(tl.float64) * factor).to(tl.int64)
        word = tl.max(candidates(key, col, open_), 0)
        pick = place_of(best_of_grid(word, board, turn, BLOCKS, "relaxed"))
        open_ = open_ & (col != pick)
        if block == 0:
            tl.store(picks + turn, pick)

        # List the rows that the pick covers better. Their order is chance, and sums are exact.
        column = by_column + pick * r
        new_head = tl.load(column + head, mask=head < r, other=0.0)
        new_tail = tl.load(column + tail, mask=tail < r, other=0.0)
        better_head = new_head > tl.load(covered + head, mask=head < r, other=0.0)
        better_tail = new_tail > tl.load(covered + tail, mask=tail < r, other=0.0)
        counter = counters + turn % 2
        place = tl.atomic_add(counter + head * 0, 1, mask=better_head, sem="relaxed")
        tl.store(places + place, head, mask=better_head)
        place = tl.atomic_add(counter + tail * 0, 1, mask=better_tail, sem="relaxed")
        tl.store(places + place, tail, mask=better_tail)
        tl.debug_barrier()
        count = tl.load(counter, volatile=True)
        tl.store(counters + (turn + 1) % 2, 0)
        gain -= _loss(
            by_row, by_column, covered, places, scale, pick, chunk, count, col, live, r, n
        )
        for start in range(CHUNK, count, CHUNK):
            item = start + chunk
            gain -= _loss(
                by_row, by_column, covered, places, scale, pick, item, count, col, live, r, n
            )
    tl.store(gains + col, tl.where(invalid > 0, -1, gain), mask=live)


def coverage(
    covering: Tensor,
    budget: int,
    weight: Tensor | None = None,
    ceiling: float | None = None,
    *,
    blocks: int | None = None,
    warps: int = 8,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """As `greedy.coverage`, in one launch; given a ceiling, without waiting for it.

    Memory beside C: its transpose, and 2·r words a block.

    Args:
        covering: C fp32 [r, n], contiguous.
        budget: 1 ≤ k ≤ n.
        weight: fp64 [n] ≥ 0, or None.
        ceiling: no column's positive part sums to more; None looks.
        blocks: size of the grid, a power of two, at most the processors of the GPU.
        warps: of a block.
        chunk: rows in flight at once.

    Raises:
        ValueError: a shape, dtype or stride is not as above, or the budget is out of range.
    """
    check_matrix(covering, "covering", square=False)
    r, n = covering.shape
    if not 1 <= budget <= n:
        raise ValueError(f"budget must be 1 to {n}, got {budget}")
    if weight is not None and (weight.shape != (n,) or weight.dtype != torch.float64):
        raise ValueError(f"weight must be fp64 [{n}], got {weight.dtype} {list(weight.shape)}")
    blocks = blocks or grid_size(covering, n)
    scale = quanta(ceiling_of(covering) if ceiling is None else ceiling)
    share = relative(weight)
    device = covering.device
    picks = torch.empty(budget, dtype=torch.int64, device=device)
    gains = torch.empty(n, dtype=torch.int64, device=device)
    width = triton.cdiv(n, blocks)
    head = 1 << (r.bit_length() - 1)
    with torch.cuda.device_of(covering):
        _coverage[(blocks,)](
            covering,
            covering.T.contiguous(),
            gains if share is None else share,
            torch.zeros(blocks, r, dtype=torch.float32, device=device),
            torch.zeros(blocks, r + chunk, dtype=torch.int32, device=device),
            torch.zeros(blocks, 2, dtype=torch.int32, device=device),
            new_board(blocks, device),
            picks,
            gains,
            r,
            n,
            width,
            budget,
            scale,
            WEIGHTED=weight is not None,
            BLOCKS=blocks,
            HEAD=head,
            TAIL=triton.next_power_of_2(max(1, r - head)),
            COLS=triton.next_power_of_2(width),
            CHUNK=chunk,
            **launch_options(covering, warps),
        )
    return picks, remaining(gains, scale, weight)
