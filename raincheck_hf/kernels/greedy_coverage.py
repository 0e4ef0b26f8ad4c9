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
    candidates,
    check_matrix,
    grid_size,
    launch_options,
    leaders_of_grid,
    new_board,
    place_of,
)

_ROW = tl.constexpr((1 << 20) - 1)


@triton.jit
def _list_rows(
    by_column, covered, places, olds, news, leader, active, r, pitch,
    AHEAD: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """List the rows that any leader covers better, and how many leaders keep out of each other.

    Returns:
        count, int32: rows listed, with the number of the first leader that covers them better,
            what covers them now, and what that leader does.
        limit, int32: leaders before the first that shares such a row with one before it.
    """
    lane = tl.arange(0, AHEAD)
    columns = by_column + leader.to(tl.int64)[:, None] * pitch
    count = 0
    limit = AHEAD
    for start in range(0, r, SPAN):
        row = start + tl.arange(0, SPAN)
        old = tl.load(covered + row, mask=row < r, other=float("inf"))
        tile = tl.load(
            columns + row[None, :], mask=active[:, None] & (row < r)[None, :], other=-float("inf")
        )
        better = tile > old[None, :]
        number = tl.where(better, lane[:, None], AHEAD)
        one = tl.min(number, 0)
        another = tl.min(tl.where(number > one[None, :], number, AHEAD), 0)
        limit = tl.minimum(limit, tl.min(another, 0))
        new = tl.max(tl.where(better & (number == one[None, :]), tile, 0.0), 0)
        listed = one < AHEAD
        upto = tl.cumsum(listed.to(tl.int32), 0)
        at = count + upto - 1
        tl.store(places + at, row | (one << 20), mask=listed)
        tl.store(olds + at, old, mask=listed)
        tl.store(news + at, new, mask=listed)
        count += tl.max(upto, 0)
    return count, limit


@triton.jit
def _coverage(
    by_row, by_column, weight, covered, places, olds, news, board, picks, gains,
    r, n, pitch, width, budget, scale,
    WEIGHTED: tl.constexpr, GROUPS: tl.constexpr, SLOTS: tl.constexpr, AHEAD: tl.constexpr,
    SPAN: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """Block b owns the gains of columns [b·width, (b + 1)·width) and a copy of what is covered.

    Args:
        by_row: C fp32 [r, n].
        by_column: its transpose, [n, pitch] of which r are used.
        weight: fp64 [n] in [0, 1], read if WEIGHTED.
        covered: fp32 [blocks, r], zero.
        places: int32 [blocks, r], scratch; olds, news: fp32 likewise.
        board: see `leaders_of_grid`.
        picks: int64 [budget], written.
        gains: int64 [n], written: what each column would still bring, in quanta; -1 for a column
            with NaN.
        scale: fp32, quanta in 1.
        GROUPS, SLOTS, AHEAD: see `leaders_of_grid`.
        SPAN: rows of the leaders' columns in flight at once.
        CHUNK, TALL: rows of the own columns in flight at once, after a pick and at the start.
    """
    block = tl.program_id(0)
    own = tl.arange(0, COLS)
    col = block * width + own
    live = (own < width) & (col < n)
    chunk = tl.arange(0, CHUNK)
    lane = tl.arange(0, AHEAD)
    covered += block.to(tl.int64) * r
    places += block.to(tl.int64) * r
    olds += block.to(tl.int64) * r
    news += block.to(tl.int64) * r
    if WEIGHTED:
        factor = tl.load(weight + col, mask=live, other=0.0)

    gain = tl.zeros([COLS], tl.int64)
    invalid = tl.zeros([COLS], tl.int32)
    for start in range(0, r, TALL):
        at = start + tl.arange(0, TALL)
        tile = tl.load(
            by_row + at.to(tl.int64)[:, None] * n + col[None, :],
            mask=(at < r)[:, None] & live[None, :],
            other=0.0,
        )
        gain += tl.sum((tl.maximum(tile, 0.0) * scale).to(tl.int64), 0)
        invalid = tl.maximum(invalid, tl.max((tile != tile).to(tl.int32), 0))

    open_ = live
    turn = 0
    done = 0
    while done < budget:
        key = gain
        if WEIGHTED:
            key = (gain.to(tl.float64) * factor).to(tl.int64)
        words = tl.reshape(candidates(key, col, open_), (GROUPS, COLS // GROUPS))
        first = tl.max(words, 1)
        second = tl.max(tl.where(words == first[:, None], -1, words), 1)
        word = leaders_of_grid(first, second, board, turn, AHEAD, GROUPS, SLOTS)
        active = word >= 0
        leader = tl.where(active, place_of(word), 0)
        count, limit = _list_rows(
            by_column, covered, places, olds, news, leader, active, r, pitch, AHEAD, SPAN
        )
        # What leaders that share no row would gain, the picks before them do not change.
        limit = tl.minimum(limit, tl.minimum(tl.sum(active.to(tl.int32), 0), budget - done))
        taken = lane < limit
        if block == 0:
            tl.store(picks + done + lane, leader, mask=taken)
        hit = (leader[:, None] == col[None, :]) & taken[:, None]
        open_ = open_ & (tl.max(hit.to(tl.int32), 0) == 0)
        tl.debug_barrier()
        loss = tl.zeros([CHUNK, COLS], tl.int64)
        for start in range(0, count, CHUNK):
            item = start + chunk
            packed = tl.load(places + item, mask=item < count, other=0)
            use = (item < count) & ((packed >> 20) < limit)
            row = packed & _ROW
            old = tl.load(olds + item, mask=use, other=0.0)
            new = tl.load(news + item, mask=use, other=0.0)
            tile = tl.load(
                by_row + row.to(tl.int64)[:, None] * n + col[None, :],
                mask=use[:, None] & live[None, :],
                other=0.0,
            )
            # Counting keeps order, so that what is clamped before it is what is clamped after.
            reached = tl.minimum(tl.maximum(tile, old[:, None]), new[:, None])
            loss += (reached * scale).to(tl.int64) - (old * scale).to(tl.int64)[:, None]
            tl.store(covered + row, new, mask=use)
        gain -= tl.sum(loss, 0)
        done += limit
        turn += 1
    tl.store(gains + col, tl.where(invalid > 0, -1, gain), mask=live)


def coverage(
    covering: Tensor,
    budget: int,
    weight: Tensor | None = None,
    ceiling: float | None = None,
    *,
    blocks: int | None = None,
    groups: int | None = None,
    ahead: int = 8,
    warps: int = 8,
    span: int = 2048,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """As `greedy.coverage`, in one launch; given a ceiling, without waiting for it.

    Memory beside C: its transpose, and 4·r words a block.

    Args:
        covering: C fp32 [r, n], contiguous.
        budget: 1 ≤ k ≤ n.
        weight: fp64 [n] ≥ 0, or None.
        ceiling: no column's positive part sums to more; None looks.
        blocks: size of the grid, a power of two, at most the processors of the GPU.
        groups: of a block's columns, a power of two; None makes 32 in all, or one a block.
        ahead: picks that one turn of the grid may take, a power of two.
        warps: of a block.
        span: rows of the leaders' columns in flight at once, a power of two.
        chunk: rows of a block's own columns in flight at once, a power of two.

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
    cols = triton.next_power_of_2(width)
    groups = min(cols, groups or max(1, 32 // blocks))
    slots = blocks * groups
    pitch = triton.cdiv(r, 16) * 16
    by_column = torch.empty(n, pitch, dtype=torch.float32, device=device)
    by_column[:, :r].copy_(covering.T)
    scratch = torch.empty(2, blocks, r, dtype=torch.float32, device=device)
    with torch.cuda.device_of(covering):
        _coverage[(blocks,)](
            covering,
            by_column,
            gains if share is None else share,
            torch.zeros(blocks, r, dtype=torch.float32, device=device),
            torch.empty(blocks, r, dtype=torch.int32, device=device),
            scratch[0],
            scratch[1],
            new_board(2 * slots, device),
            picks,
            gains,
            r,
            n,
            pitch,
            width,
            budget,
            scale,
            WEIGHTED=weight is not None,
            GROUPS=groups,
            SLOTS=slots,
            AHEAD=min(ahead, slots),
            SPAN=min(span, triton.next_power_of_2(r)),
            COLS=cols,
            CHUNK=chunk,
            TALL=max(chunk, 8192 // cols),
            **launch_options(covering, warps),
        )
    return picks, remaining(gains, scale, weight)
