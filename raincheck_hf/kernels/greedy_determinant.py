# mypy: disable-error-code="no-untyped-def,assignment,misc,var-annotated"
# An annotation in a jitted function speaks to Triton, which unrolls loops that make tuples longer.
"""Greedy determinants in one kernel. Twin: `greedy.determinant`, which takes the same picks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from raincheck_hf.kernels.greedy import KEY_STEP, diagonal_ceiling, square_quanta, start_of
from raincheck_hf.kernels.greedy_grid import (
    candidates,
    check_matrix,
    grid_size,
    key_of,
    launch_options,
    new_board,
    place_of,
    words_of_grid,
)


@triton.jit
def _rounded(rest, root):
    """A row of the factor, in whole quanta: rest / root."""
    return tl.floor(rest.to(tl.float64) / root + 0.5).to(tl.int32)


@triton.jit
def _product(one, other):
    """Of two of the factor's numbers, int64; widened here, so that one instruction multiplies."""
    return one.to(tl.int64) * other.to(tl.int64)


@triton.jit
def _chosen(flags, values, AHEAD: tl.constexpr):
    """The value whose flag is set; the last one where none is."""
    value = values[AHEAD - 1]
    for i in tl.static_range(AHEAD - 1):
        value = tl.where(flags[i], values[i], value)
    return value


@triton.jit
def _theirs(columns, places, step, done, budget, AHEAD: tl.constexpr):
    """Some rows of the factor's columns at several places, around the first-level cache."""
    values = ()
    for a in tl.static_range(AHEAD):
        value = tl.load(
            columns + places[a] * budget + step, mask=step < done, other=0, cache_modifier=".cg"
        )
        values = values + (value,)
    return values


@triton.jit
def _sums(values, COUNT: tl.constexpr):
    """Each of 1, 2 or 4 tensors summed over its first axis, side by side: warps meet once."""
    if COUNT == 1:
        results = (tl.sum(values[0], 0),)
    elif COUNT == 2:
        one, two = tl.split(tl.sum(tl.join(values[0], values[1]), 0))
        results = (one, two)
    else:
        left, right = tl.join(values[0], values[1]), tl.join(values[2], values[3])
        left, right = tl.split(tl.sum(tl.join(left, right), 0))
        one, two = tl.split(left)
        three, four = tl.split(right)
        results = (one, two, three, four)
    return results


@triton.jit
def _between(values, AHEAD: tl.constexpr):
    """Products of all pairs of 1, 2 or 4 leaders' rows: 01, 02, 03, 12, 13, 23."""
    products = ()
    for a in tl.static_range(AHEAD):
        for b in tl.static_range(a + 1, AHEAD):
            products = products + (_product(values[a], values[b]),)
    return products


@triton.jit
def _products(
    slices, columns, places, own, live, done, width, budget,
    AHEAD: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Σ_s V_sp V_sj of the leaders p with the own columns j, and with each other.

    Rows are in flight DEPTH at a time and folded to FOLD, as many as all threads hold side by
    side, before they are added up: what one thread holds needs no other.

    Returns:
        mine: int64 [COLS] for each leader; pairs: int64 [], leader a with leader b at a·AHEAD + b.
    """
    PAIRS: tl.constexpr = AHEAD * (AHEAD - 1) // 2
    sums = ()
    for _ in tl.static_range(AHEAD):
        sums = sums + (tl.zeros([FOLD, COLS], tl.int64),)
    both = ()
    for _ in tl.static_range(PAIRS):
        both = both + (tl.zeros([DEPTH], tl.int64),)
    theirs = _theirs(columns, places, tl.arange(0, DEPTH), done, budget, AHEAD)
    for first in range(0, done, DEPTH):
        step = first + tl.arange(0, DEPTH)
        # They come from the second-level cache: asked for while others are multiplied.
        following = _theirs(columns, places, step + DEPTH, done, budget, AHEAD)
        ours = tl.load(
            slices + step[:, None] * width + own[None, :],
            mask=(step < done)[:, None] & live[None, :],
            other=0,
        ).to(tl.int64)
        more = ()
        for a in tl.static_range(AHEAD):
            product = ours * theirs[a].to(tl.int64)[:, None]
            folded = tl.sum(tl.reshape(product, (DEPTH // FOLD, FOLD, COLS)), 0)
            more = more + (sums[a] + folded,)
        sums = more
        between = _between(theirs, AHEAD)
        more = ()
        for i in tl.static_range(PAIRS):
            more = more + (both[i] + between[i],)
        both = more
        theirs = following
    mine = _sums(sums, AHEAD)
    zero = tl.zeros((), tl.int64)
    if AHEAD == 1:
        pairs = (zero,)
    elif AHEAD == 2:
        x = _sums(both, 1)
        pairs = (zero, x[0], x[0], zero)
    else:
        x = _sums((both[0], both[1], both[2], both[3]), 4)
        y = _sums((both[4], both[5]), 2)
        pairs = (
            zero, x[0], x[1], x[2],
            x[0], zero, x[3], y[0],
            x[1], x[3], zero, y[1],
            x[2], y[0], y[1], zero,
        )  # fmt: skip
    return mine, pairs


@triton.jit
def _determinant(
    matrix, start, smallest, slices, columns, exact, board, picks, residuals,
    n, width, budget, scale,
    BLOCKS: tl.constexpr, COLS: tl.constexpr, AHEAD: tl.constexpr, DEPTH: tl.constexpr,
    FOLD: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Block b owns the residuals and the factor's columns [b·width, (b + 1)·width).

    The factor is written twice. A block reads its own slice of it at every turn, a line of memory
    a row, which its first-level cache holds. The column of a leader belongs to another block, and
    is read around that cache, which may be stale.

    Args:
        matrix: L fp32 [n, n].
        start, smallest: int64 [n], see `greedy.start_of`.
        slices: int32 [BLOCKS, budget, width], scratch: the factor by block.
        columns: int32 [n, budget], scratch: the factor by token.
        exact: int64 [2, BLOCKS], scratch: the residual behind each block's best word.
        board: see `words_of_grid`.
        picks: int64 [budget], -1; written until the rank is used up.
        residuals: int64 [n], written.
        scale: fp32, quanta of a residual in 1.
        AHEAD: picks that a turn may take.
        DEPTH, FOLD: see `_products`.
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
    done = 0
    going = True
    while going:
        word = candidates(residual // STEP, col, open_ & (residual > least))
        best = tl.max(word, 0)
        second = tl.max(tl.where(word == best, -1, word), 0)
        page = exact + (turn % 2) * BLOCKS
        tl.store(page + block, tl.sum(tl.where(word == best, residual, 0), 0))
        firsts, seconds = words_of_grid(
            tl.full([1], best, tl.int64), tl.full([1], second, tl.int64), board, turn,
            BLOCKS, "release",
        )  # fmt: skip
        words = ()
        places = ()
        for _ in tl.static_range(AHEAD):
            leader = tl.max(firsts, 0)
            firsts = tl.where(firsts == leader, -1, firsts)
            words = words + (leader,)
            places = places + (tl.where(leader >= 0, place_of(leader), 0),)
        # Residuals only fall: what is above this word is above all that are no leaders.
        bound = tl.maximum(tl.max(firsts, 0), tl.max(seconds, 0))
        found = words[0] >= 0
        if found:
            lefts = ()
            leasts = ()
            rests = ()
            pairs = ()
            for a in tl.static_range(AHEAD):
                owner = page + places[a] // width
                lefts = lefts + (tl.load(owner, volatile=True),)
                leasts = leasts + (tl.load(smallest + places[a]),)
                row = tl.load(matrix + places[a] * n + col, mask=live, other=0.0)
                rests = rests + ((row.to(tl.float64) * scale).to(tl.int64),)
                for b in tl.static_range(AHEAD):
                    entry = tl.load(matrix + places[a] * n + places[b])
                    pairs = pairs + ((entry.to(tl.float64) * scale).to(tl.int64),)
            past, past_pairs = _products(
                slices, columns, places, own, live, done, width, budget, AHEAD, COLS, DEPTH, FOLD
            )
            more = ()
            for a in tl.static_range(AHEAD):
                more = more + (rests[a] - past[a],)
            rests = more
            more = ()
            for i in tl.static_range(AHEAD * AHEAD):
                more = more + (pairs[i] - past_pairs[i],)
            pairs = more
            taken = 0
            for t in tl.static_range(AHEAD):
                top = words[0]
                for a in tl.static_range(1, AHEAD):
                    top = tl.maximum(top, words[a])
                ok = top >= 0
                if t > 0:
                    ok = (top > bound) & (done + t < budget)
                if ok:
                    pick = place_of(top)
                    root = tl.sqrt((key_of(top) * STEP).to(tl.float64))
                    flags = ()
                    for a in tl.static_range(AHEAD):
                        flags = flags + (words[a] == top,)
                    new = _rounded(_chosen(flags, rests, AHEAD), root)
                    residual -= _product(new, new)
                    open_ = open_ & (col != pick)
                    tl.store(slices + (done + t) * width + own, new, mask=live)
                    tl.store(mine + (done + t), new, mask=live)
                    if block == 0:
                        tl.store(picks + (done + t), pick)
                    taken += 1
                    if t + 1 < AHEAD:
                        theirs = ()
                        for b in tl.static_range(AHEAD):
                            column = ()
                            for a in tl.static_range(AHEAD):
                                column = column + (pairs[a * AHEAD + b],)
                            theirs = theirs + (_rounded(_chosen(flags, column, AHEAD), root),)
                        next_rests = ()
                        next_pairs = ()
                        next_lefts = ()
                        next_words = ()
                        for a in tl.static_range(AHEAD):
                            next_rests = next_rests + (rests[a] - _product(theirs[a], new),)
                            for b in tl.static_range(AHEAD):
                                value = pairs[a * AHEAD + b] - _product(theirs[a], theirs[b])
                                next_pairs = next_pairs + (value,)
                            left = lefts[a] - _product(theirs[a], theirs[a])
                            again = (words[a] >= 0) & (words[a] != top) & (left > leasts[a])
                            next_lefts = next_lefts + (left,)
                            next_words = next_words + (candidates(left // STEP, places[a], again),)
                        rests = next_rests
                        pairs = next_pairs
                        lefts = next_lefts
                        words = next_words
            done += taken
        turn += 1
        going = found & (done < budget)
    tl.store(residuals + col, residual, mask=live)


def determinant(
    kernel: Tensor,
    budget: int,
    tolerance: float = 1e-5,
    floor: float = 1e-12,
    ceiling: float | None = None,
    *,
    blocks: int | None = None,
    ahead: int = 4,
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
        ahead: picks that one turn of the grid may take: 1, 2 or 4.
        warps: of a block.
        depth: rows of the factor in flight at once, a power of two.

    Raises:
        ValueError: a shape, dtype or stride is not as above, or the budget is out of range.
    """
    check_matrix(kernel, "kernel", square=True)
    n, device = len(kernel), kernel.device
    if not 1 <= budget <= n:
        raise ValueError(f"budget must be 1 to {n}, got {budget}")
    if ahead not in (1, 2, 4):
        raise ValueError(f"ahead must be 1, 2 or 4, got {ahead}")
    blocks = blocks or grid_size(kernel, n)
    width = triton.cdiv(n, blocks)
    cols = triton.next_power_of_2(width)
    depth = depth or max(16, min(256, 8192 // cols))
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
            torch.empty(2, blocks, dtype=torch.int64, device=device),
            new_board(2 * blocks, device),
            picks,
            residuals,
            n,
            width,
            budget,
            scale,
            BLOCKS=blocks,
            COLS=cols,
            AHEAD=ahead,
            DEPTH=depth,
            FOLD=min(depth, max(1, 128 * warps // cols)),
            STEP=KEY_STEP,
            **launch_options(kernel, warps),
        )
    return picks[picks >= 0], (residuals.double() / scale).float()
