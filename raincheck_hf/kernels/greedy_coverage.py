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
    read_again,
    total_of_grid,
)

_ROW = tl.constexpr((1 << 20) - 1)


@triton.jit
def _list_rows(
    matrix, covered, ring, first, height, leader, active, limit, r, n,
    AHEAD: tl.constexpr, HIGH: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Append the block's rows that a leader covers better to the list of all blocks.

    A row carries the number of the first leader that covers it better, what covers it now, and
    what that leader does. Rows of leaders that cannot be taken any more are left out.

    Args:
        ring: int32 [1 + 3·RING]: the entries of all turns so far, modulo 2^32, and the list.
        first, height: the block's rows.
        limit: int32 [], no more leaders than this will be taken.

    Returns:
        count, int32: rows listed.
        limit, int32: leaders before the first that shares a row of the block with one before it.
    """
    lane = tl.arange(0, AHEAD)
    places = ring + 1
    olds = (places + RING).to(tl.pointer_type(tl.float32))
    news = olds + RING
    count = 0
    for part in range(0, height, HIGH):
        inside = part + tl.arange(0, HIGH)
        row = first + inside
        live = (inside < height) & (row < r)
        old = tl.load(covered + row, mask=live, other=float("inf"))
        tile = tl.load(
            matrix + row.to(tl.int64)[None, :] * n + leader[:, None],
            mask=active[:, None] & live[None, :],
            other=-float("inf"),
        )
        better = tile > old[None, :]
        number = tl.where(better, lane[:, None], AHEAD)
        one = tl.min(number, 0)
        another = tl.min(tl.where(number > one[None, :], number, AHEAD), 0)
        limit = tl.minimum(limit, tl.min(another, 0))
        new = tl.max(tl.where(better & (number == one[None, :]), tile, 0.0), 0)
        listed = one < limit
        upto = tl.cumsum(listed.to(tl.int32), 0)
        more = tl.max(upto, 0)
        if more > 0:
            at = (tl.atomic_add(ring, more, sem="relaxed") + upto - 1) & (RING - 1)
            tl.store(places + at, row | (one << 20), mask=listed)
            tl.store(olds + at, old, mask=listed)
            tl.store(news + at, new, mask=listed)
            count += more
    return count, limit


@triton.jit
def _coverage(
    matrix, weight, covered, ring, board, picks, gains,
    r, n, width, height, budget, scale,
    WEIGHTED: tl.constexpr, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, AHEAD: tl.constexpr,
    AGAIN: tl.constexpr,
    HIGH: tl.constexpr, COLS: tl.constexpr, CHUNK: tl.constexpr, TALL: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    """Block b owns the gains of columns [b·width, (b + 1)·width), and rows [b·height, …).

    Args:
        matrix: C fp32 [r, n].
        weight: fp64 [n] in [0, 1], read if WEIGHTED.
        covered: fp32 [r], zero; a row is read and written by its block alone.
        ring: see `_list_rows`, zero at its start.
        board: int64 [6·GROUPS·BLOCKS], zero; see `words_of_grid` and `total_of_grid`.
        picks: int64 [budget], written.
        gains: int64 [n], written: what each column would still bring, in quanta; -1 for a column
            with NaN.
        scale: fp32, quanta in 1.
        BLOCKS, GROUPS, AHEAD, AGAIN: see `leaders_of_grid`.
        HIGH: own rows in flight at once.
        CHUNK, TALL: rows of the own columns in flight at once, after picks and at the start.
        RING: a power of two, at least 2·r: what a turn lists is read before the next one ends.
    """
    block = tl.program_id(0)
    own = tl.arange(0, COLS)
    col = block * width + own
    live = (own < width) & (col < n)
    chunk = tl.arange(0, CHUNK)
    lane = tl.arange(0, AHEAD)
    slots: tl.constexpr = GROUPS * BLOCKS
    places = ring + 1
    olds = (places + RING).to(tl.pointer_type(tl.float32))
    news = olds + RING
    upper = block * height
    if WEIGHTED:
        factor = tl.load(weight + col, mask=live, other=0.0)

    gain = tl.zeros([COLS], tl.int64)
    invalid = tl.zeros([COLS], tl.int32)
    for start in range(0, r, TALL):
        at = start + tl.arange(0, TALL)
        tile = tl.load(
            matrix + at.to(tl.int64)[:, None] * n + col[None, :],
            mask=(at < r)[:, None] & live[None, :],
            other=0.0,
        )
        gain += tl.sum((tl.maximum(tile, 0.0) * scale).to(tl.int64), 0)
        invalid = tl.maximum(invalid, tl.max((tile != tile).to(tl.int32), 0))

    open_ = live
    turn = 0
    done = 0
    begin = 0
    while done < budget:
        key = gain
        if WEIGHTED:
            key = (gain.to(tl.float64) * factor).to(tl.int64)
        words = tl.reshape(candidates(key, col, open_), (GROUPS, COLS // GROUPS))
        best = tl.max(words, 1)
        second = tl.max(tl.where(words == best[:, None], -1, words), 1)
        word = leaders_of_grid(best, second, board, turn, AHEAD, BLOCKS, AGAIN)
        active = word >= 0
        leader = tl.where(active, place_of(word), 0)
        # What leaders that share no row would gain, the picks before them do not change.
        limit = tl.minimum(tl.sum(active.to(tl.int32), 0), budget - done)
        count, limit = _list_rows(
            matrix, covered, ring, upper, height, leader, active, limit, r, n, AHEAD, HIGH, RING
        )
        count, limit = total_of_grid(count, limit, board + 4 * slots, turn, BLOCKS)
        loss = tl.zeros([CHUNK, COLS], tl.int64)
        for start in range(0, count, CHUNK):
            item = start + chunk
            at = (begin + item) & (RING - 1)
            packed = tl.load(places + at, mask=item < count, other=0, cache_modifier=".cg")
            use = (item < count) & ((packed >> 20) < limit)
            row = packed & _ROW
            old = tl.load(olds + at, mask=use, other=0.0, cache_modifier=".cg")
            new = tl.load(news + at, mask=use, other=0.0, cache_modifier=".cg")
            tile = tl.load(
                matrix + row.to(tl.int64)[:, None] * n + col[None, :],
                mask=use[:, None] & live[None, :],
                other=0.0,
            )
            # Counting keeps order, so that what is clamped before it is what is clamped after.
            reached = tl.minimum(tl.maximum(tile, old[:, None]), new[:, None])
            loss += (reached * scale).to(tl.int64) - (old * scale).to(tl.int64)[:, None]
            tl.store(covered + row, new, mask=use & (row >= upper) & (row < upper + height))
        gain -= tl.sum(loss, 0)
        taken = lane < limit
        if block == 0:
            tl.store(picks + done + lane, leader, mask=taken)
        hit = (leader[:, None] == col[None, :]) & taken[:, None]
        open_ = open_ & (tl.max(hit.to(tl.int32), 0) == 0)
        begin += count
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
    ahead: int = 16,
    warps: int = 8,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `greedy.coverage`, in one launch; given a ceiling, without waiting for it.

    Memory beside C: some words a row and a column.

    Args:
        covering: C fp32 [r, n], contiguous.
        budget: 1 ≤ k ≤ n.
        weight: fp64 [n] ≥ 0, or None.
        ceiling: no column's positive part sums to more; None looks.
        blocks: size of the grid, a power of two, at most the processors of the GPU.
        groups: of a block's columns, a power of two; None makes 32 in all, or one a block.
        ahead: picks that one turn of the grid may take, a power of two, at most 1024.
        warps: of a block.
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
    width, height = triton.cdiv(n, blocks), triton.cdiv(r, blocks)
    cols = triton.next_power_of_2(width)
    chunk = chunk or max(32, min(256, 8192 // cols))
    groups = min(cols, groups or max(1, 32 // blocks))
    ring = max(16, triton.next_power_of_2(2 * r))
    with torch.cuda.device_of(covering):
        _coverage[(blocks,)](
            covering,
            gains if share is None else share,
            torch.zeros(r, dtype=torch.float32, device=device),
            torch.zeros(1 + 3 * ring, dtype=torch.int32, device=device),
            new_board(3 * groups * blocks, device),
            picks,
            gains,
            r,
            n,
            width,
            height,
            budget,
            scale,
            WEIGHTED=weight is not None,
            BLOCKS=blocks,
            GROUPS=groups,
            AHEAD=min(ahead, groups * blocks),
            AGAIN=read_again(2 * groups * blocks, warps),
            HIGH=min(128, triton.next_power_of_2(height)),
            COLS=cols,
            CHUNK=chunk,
            TALL=max(chunk, 8192 // cols),
            RING=ring,
            **launch_options(covering, warps),
        )
    return picks, remaining(gains, scale, weight)
