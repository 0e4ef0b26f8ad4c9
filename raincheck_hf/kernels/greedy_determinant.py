# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Greedy determinants in one kernel. Twin: `greedy.determinant`, which takes the same picks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from raincheck_hf.kernels.greedy import KEY_STEP, diagonal_ceiling, square_quanta
from raincheck_hf.kernels.greedy_grid import (
    best_words,
    candidates,
    check_matrix,
    grid_size,
    key_of,
    largest,
    launch_options,
    new_board,
    place_of,
    pool_of_grid,
    read_again,
)

PLACES = 4
"""Words that a block publishes a turn."""
POOL = 32
"""Tokens that a turn looks at: a warp has a lane for each."""

_EXACT = tl.constexpr(float(2**53))  # fp64 holds every whole number up to it


@triton.jit
def _start(
    matrix, token, known, n, scale,
    TOLERANCE: tl.constexpr, FLOOR: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """`greedy.start_of` of some tokens; of those that are not known, nothing that counts."""
    diagonal = tl.load(matrix + token.to(tl.int64) * (n + 1), mask=known, other=0.0)
    residual = diagonal.to(tl.float64) * scale
    residual = tl.where((residual >= 0.0) & (residual <= _EXACT), residual, 0.0)
    residual = tl.floor(residual)
    quanta = tl.zeros_like(residual) + scale
    smallest = tl.maximum(residual * TOLERANCE, quanta * FLOOR)
    smallest = tl.maximum(smallest, 2.0 * tl.sqrt(residual))
    smallest = tl.floor(tl.minimum(tl.maximum(smallest, STEP), _EXACT))
    return residual, tl.where(known, smallest, float("inf"))


@triton.jit
def _products(
    factor, member, col, live, done, pitch,
    POOL: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Σ_s V_s,member V_s,col over the rows s < done, fp64 [POOL, COLS]: whole numbers, exact.

    Other blocks wrote what is read, so that it is read around the first-level cache. What lies
    beyond `done` may be anything that an int32 holds.
    """
    step = tl.arange(0, DEPTH)
    theirs = factor + member.to(tl.int64)[:, None] * pitch + step[None, :]
    ours = factor + col.to(tl.int64)[None, :] * pitch + step[:, None]
    products = tl.zeros([POOL, COLS], tl.float64)
    for first in tl.range(0, done, DEPTH, num_stages=1):
        a = tl.load(theirs + first, cache_modifier=".cg")
        b = tl.load(ours + first, mask=live[None, :], other=0, cache_modifier=".cg")
        a = tl.where((first + step < done)[None, :], a, 0).to(tl.float64)
        products = tl.dot(a, b.to(tl.float64), products, out_dtype=tl.float64)
    return products


@triton.jit
def _complements(
    reach, member, col, live, mine, square, stage, turn,
    POOL: tl.constexpr, COLS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What L_{member, token} has left beside the factor, fp64 [POOL, WIDE]: pool, then own columns.

    A block knows it for its own columns: `reach`, int64 [POOL, COLS]. Members' columns, each from
    the block that owns it, make a square that all blocks write and read. Its words carry a tag as
    those of a board do, so that it needs no barrier; each is written at every turn, that of a place
    without a member by the first block.

    Args:
        square: int64 [2, POOL, POOL]; stage: int64 [2, POOL, COLS], the block's own.
    """
    slot = tl.arange(0, POOL)
    own = tl.arange(0, COLS)
    lane = tl.arange(0, WIDE)
    tag = 1 + (turn // 2) % 2
    square += (turn % 2) * (POOL * POOL)
    stage += (turn % 2) * (POOL * COLS)
    words = reach * 4 + tag
    tl.store(stage + slot[:, None] * COLS + own[None, :], words)
    hit = (member[:, None] == col[None, :]) & live[None, :]
    place = tl.max(tl.where(hit, slot[:, None], -1), 0)
    tl.atomic_xchg(
        square + slot[:, None] * POOL + place[None, :],
        words,
        mask=(slot >= 0)[:, None] & (place >= 0)[None, :],
        sem="relaxed",
    )
    tl.store(
        square + slot[:, None] * POOL + slot[None, :],
        tl.zeros([POOL, POOL], tl.int64) + tag,
        mask=(member < 0)[None, :] & (tl.program_id(0) == 0),
    )
    pooled = (lane < POOL)[None, :] & (slot >= 0)[:, None]
    at = tl.where(
        pooled,
        square + slot[:, None] * POOL + lane[None, :],
        stage + slot[:, None] * COLS + (lane - POOL)[None, :],
    )
    tl.debug_barrier()
    ours = tl.load(at, mask=mine[None, :] & (slot >= 0)[:, None], other=0, volatile=True)
    theirs = tl.zeros([POOL, WIDE], tl.int64)
    late = 1
    while late > 0:
        theirs = tl.load(at, mask=pooled, other=tag, volatile=True)
        late = tl.max(tl.max(((theirs & 3) != tag).to(tl.int32), 1), 0)
    return (tl.where(pooled, theirs, ours) >> 2).to(tl.float64)


@triton.jit
def _determinant(
    matrix, factor, square, stage, board, picks, residuals,
    n, width, budget, pitch, scale,
    BLOCKS: tl.constexpr, PLACES: tl.constexpr, POOL: tl.constexpr, COLS: tl.constexpr,
    WIDE: tl.constexpr, DEPTH: tl.constexpr, AGAIN: tl.constexpr,
    TOLERANCE: tl.constexpr, FLOOR: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Block b owns the residuals and the factor's columns [b·width, (b + 1)·width).

    Vectors [WIDE] hold the pool, POOL tokens, and behind it the block's own tokens.

    Args:
        matrix: L fp32 [n, n].
        factor: int32 [n, pitch], scratch: the Cholesky factor, a token a row.
        square: int64 [2, POOL, POOL], zero; stage: int64 [BLOCKS, 2, POOL, COLS], scratch.
        board: int64 [2, BLOCKS·PLACES], zero, see `words_of_grid`.
        picks: int64 [budget], written; -1 from where the rank is used up.
        residuals: fp64 [n], written.
        scale: fp32, quanta of a residual in 1.
        TOLERANCE, FLOOR: see `determinant`.
        STEP: `greedy.KEY_STEP`.
    """
    block = tl.program_id(0)
    slot = tl.arange(0, POOL)
    own = tl.arange(0, COLS)
    col = block * width + own
    live = (own < width) & (col < n)
    lane = tl.arange(0, WIDE)
    token = block * width + lane - POOL
    mine = (lane >= POOL) & (lane < POOL + width) & (token < n)
    token = tl.where(mine, token, -1)
    left, least = _start(matrix, token, mine, n, scale, TOLERANCE, FLOOR, STEP)
    stage += block * (2 * POOL * COLS)
    turn = 0
    done = 0
    going = True
    while going:
        open_ = (lane >= POOL) & (left > least)
        best = best_words(candidates(left.to(tl.int64) // STEP, token, open_), PLACES)
        member, word, bound = pool_of_grid(best, board, turn, POOL, BLOCKS, AGAIN)
        going = word >= 0
        if going:
            numbers = tl.load(
                matrix + member.to(tl.int64)[:, None] * n + col[None, :],
                mask=(member >= 0)[:, None] & live[None, :],
                other=0.0,
            )
            _, lowest = _start(matrix, member, member >= 0, n, scale, TOLERANCE, FLOOR, STEP)
            products = _products(
                factor, tl.maximum(member, 0), col, live, done, pitch, POOL, COLS, DEPTH
            )
            reach = (numbers * scale).to(tl.int64) - products.to(tl.int64)
            table = _complements(
                reach, member, col, live, mine, square, stage, turn, POOL, COLS, WIDE
            )
            same = slot[:, None] == lane[None, :]
            pooled = lane < POOL
            token = tl.where(pooled, tl.max(tl.where(same, member[:, None], -1), 0), token)
            least = tl.where(pooled, tl.sum(tl.where(same, lowest[:, None], 0.0), 0), least)
            left = tl.where(pooled, tl.sum(tl.where(same, table, 0.0), 0), left)
            taking = True
            while taking:
                pick = place_of(word)
                inverse = 1.0 / tl.sqrt((key_of(word) * STEP).to(tl.float64))
                row = tl.sum(tl.where((member == pick)[:, None], table, 0.0), 0)
                new = tl.floor(row * inverse + 0.5).to(tl.int32)
                tl.store(factor + token.to(tl.int64) * pitch + done, new, mask=mine)
                tl.store(picks + done, pick, mask=block == 0)
                down = tl.sum(tl.where(same, new[None, :], 0), 1).to(tl.float64)
                across = new.to(tl.float64)
                table -= down[:, None] * across[None, :]
                left -= across * across
                open_ = pooled & (left > least)
                word = largest(candidates(left.to(tl.int64) // STEP, token, open_))
                done += 1
                # What was left out may have lost since, but cannot have gained.
                taking = (word > bound) & (done < budget)
            turn += 1
            going = done < budget
    tl.store(residuals + token, left, mask=mine)


def determinant(
    kernel: Tensor,
    budget: int,
    tolerance: float = 1e-5,
    floor: float = 1e-12,
    ceiling: float | None = None,
    *,
    blocks: int | None = None,
    places: int = PLACES,
    warps: int | None = None,
    depth: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `greedy.determinant`, in one launch; given a ceiling, without waiting for it.

    Memory beside L: budget·n words, the budget rounded up to a multiple of the depth.

    Args:
        kernel: L fp32 [n, n], contiguous, symmetric positive semidefinite.
        budget: 1 ≤ k ≤ n.
        tolerance: smallest residual, relative to the diagonal, that still counts.
        floor: smallest residual that still counts, absolute.
        ceiling: no entry of the diagonal is larger; None looks.
        blocks: size of the grid, a power of two, at most the processors of the GPU.
        places: words that a block publishes, a power of two, at least 2.
        warps: of a block, a power of two.
        depth: rows of the factor in flight at once, a power of two, at least 16.

    Raises:
        ValueError: a shape, dtype or stride is not as above, or budget or places are out of range.
    """
    check_matrix(kernel, "kernel", square=True)
    n, device = len(kernel), kernel.device
    if not 1 <= budget <= n:
        raise ValueError(f"budget must be 1 to {n}, got {budget}")
    if places < 2 or places & (places - 1):
        raise ValueError(f"places must be a power of two from 2 on, got {places}")
    blocks = blocks or grid_size(kernel, n)
    width = triton.cdiv(n, blocks)
    cols = max(16, triton.next_power_of_2(width))
    wide = triton.next_power_of_2(POOL + cols)
    warps = warps or max(4, min(8, wide // 16))
    depth = depth or max(16, min(128, 8192 // cols))
    pitch = triton.cdiv(budget, depth) * depth
    picks = torch.full((budget,), -1, dtype=torch.int64, device=device)
    residuals = torch.empty(n, dtype=torch.float64, device=device)
    scale = square_quanta(diagonal_ceiling(kernel) if ceiling is None else ceiling)
    with torch.cuda.device_of(kernel):
        _determinant[(blocks,)](
            kernel,
            torch.empty(n, pitch, dtype=torch.int32, device=device),
            new_board(POOL * POOL, device),
            torch.empty(blocks, 2, POOL, cols, dtype=torch.int64, device=device),
            new_board(blocks * places, device),
            picks,
            residuals,
            n,
            width,
            budget,
            pitch,
            scale,
            BLOCKS=blocks,
            PLACES=places,
            POOL=POOL,
            COLS=cols,
            WIDE=wide,
            DEPTH=depth,
            AGAIN=read_again(blocks * places, warps),
            TOLERANCE=tolerance,
            FLOOR=floor,
            STEP=KEY_STEP,
            # A product is rounded before a half is added to it, as in the loop.
            **launch_options(kernel, warps, enable_fp_fusion=False),
        )
    return picks, (residuals / scale).float()
