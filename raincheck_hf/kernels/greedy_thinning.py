# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Thinning out near-duplicates in one kernel. Twin: `greedy.thinned`, which keeps the same."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from raincheck_hf.kernels.greedy import per_round
from raincheck_hf.kernels.greedy_grid import (
    best_of_grid,
    check_matrix,
    grid_size,
    launch_options,
    new_board,
)


@triton.jit
def _thinned(
    similar, left, nearest, kept, board, n, m, keep, step,
    BLOCKS: tl.constexpr, MINE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rounds of three stages, a grid-wide barrier after each; tokens are dealt over the blocks.

    A block works on MINE tokens of the first hand at once, against WIDE others: what costs is how
    often loads wait for each other.

    Args:
        similar: fp32 [n, n].
        left: int32 [2, m], two pages, the tokens left: page 0 holds all at the start, and after
            round i page i modulo 2 holds the result.
        nearest: fp32 [m], scratch.
        kept: int32 [m], scratch.
        board: see `best_of_grid`.
        step: tokens to drop in a round.
    """
    block = tl.program_id(0)
    mine = block + BLOCKS * tl.arange(0, MINE)
    lane = tl.arange(0, WIDE)
    token = tl.zeros((), tl.int64)
    count = m + block * 0
    turn = 0
    while count > keep:
        firsts = (count + 1) // 2
        seconds = count // 2
        page = left + turn // 3 % 2 * m
        following = left + (turn // 3 + 1) % 2 * m
        drop = tl.minimum(tl.minimum(step, count - keep), firsts)
        for part in range(0, firsts, BLOCKS * MINE):
            i = part + mine
            first = tl.load(page + 2 * i, mask=i < firsts, other=0, cache_modifier=".cg")
            rows = similar + first.to(tl.int64)[:, None] * n
            most = tl.full([MINE, WIDE], -float("inf"), tl.float32)
            for start in range(0, seconds, WIDE):
                j = start + lane
                other = tl.load(page + 2 * j + 1, mask=j < seconds, other=0, cache_modifier=".cg")
                value = tl.load(
                    rows + other[None, :],
                    mask=(i < firsts)[:, None] & (j < seconds)[None, :],
                    other=-float("inf"),
                )
                most = tl.maximum(most, value)
            tl.store(nearest + i, tl.max(most, 1), mask=i < firsts)
        best_of_grid(token, board, turn, BLOCKS, "release")

        for part in range(0, firsts, BLOCKS * MINE):
            i = part + mine
            own = tl.load(nearest + i, mask=i < firsts, other=0.0, cache_modifier=".cg")
            ahead = tl.zeros([MINE, WIDE], tl.int32)
            for start in range(0, firsts, WIDE):
                j = start + lane
                value = tl.load(
                    nearest + j, mask=j < firsts, other=-float("inf"), cache_modifier=".cg"
                )[None, :]
                before = (j[None, :] < i[:, None]) & (value == own[:, None])
                nearer = (value > own[:, None]) | before
                ahead += (nearer & (j < firsts)[None, :]).to(tl.int32)
            tl.store(kept + i, (tl.sum(ahead, 1) >= drop).to(tl.int32), mask=i < firsts)
        best_of_grid(token, board, turn + 1, BLOCKS, "release")

        for part in range(0, firsts, BLOCKS * MINE):
            i = part + mine
            inside = i < firsts
            stays = tl.load(kept + i, mask=inside, other=0, cache_modifier=".cg")
            first = tl.load(page + 2 * i, mask=inside, other=0, cache_modifier=".cg")
            paired = i < seconds
            second = tl.load(page + 2 * i + 1, mask=paired, other=0, cache_modifier=".cg")
            before = tl.zeros([MINE, WIDE], tl.int32)
            for start in range(0, firsts, WIDE):
                j = start + lane
                value = tl.load(kept + j, mask=j < firsts, other=0, cache_modifier=".cg")
                before += tl.where(j[None, :] < i[:, None], value[None, :], 0)
            place = i + tl.sum(before, 1)  # i seconds lie before first i
            tl.store(following + place, first, mask=inside & (stays > 0))
            tl.store(following + place + stays, second, mask=paired)
        best_of_grid(token, board, turn + 2, BLOCKS, "release")
        count -= drop
        turn += 3


def thinned(
    similar: Tensor,
    keep: int,
    rounds: int,
    tokens: Tensor | None = None,
    *,
    mine: int = 16,
    wide: int = 512,
    warps: int = 8,
) -> Tensor:
    """As `greedy.thinned`, in one launch and without waiting for it.

    Args:
        similar: fp32 [n, n], contiguous, symmetric.
        keep: 1 ≤ keep ≤ m.
        rounds: about how many to need.
        tokens: int64 [m], ascending, below n: those to thin out; None is all.
        mine, wide: tokens that a block looks at at once, and others for each; powers of two.
        warps: of a block.

    Raises:
        ValueError: a shape, dtype or stride is not as above, or keep is out of range.
    """
    check_matrix(similar, "similar", square=True)
    n, device = len(similar), similar.device
    if tokens is None:
        tokens = torch.arange(n, device=device)
    if tokens.ndim != 1 or tokens.dtype != torch.int64:
        raise ValueError(f"tokens must be int64 [m], got {tokens.dtype} {list(tokens.shape)}")
    m = len(tokens)
    if not 1 <= keep <= m:
        raise ValueError(f"keep must be 1 to {m}, got {keep}")
    if keep == m:
        return tokens
    step = per_round(m, keep, rounds)
    blocks = grid_size(similar, m)
    left = torch.empty(2, m, dtype=torch.int32, device=device)
    left[0].copy_(tokens)
    with torch.cuda.device_of(similar):
        _thinned[(blocks,)](
            similar,
            left,
            torch.empty(m, dtype=torch.float32, device=device),
            torch.empty(m, dtype=torch.int32, device=device),
            new_board(blocks, device),
            n,
            m,
            keep,
            step,
            BLOCKS=blocks,
            MINE=mine,
            WIDE=wide,
            **launch_options(similar, warps),
        )
    done, count = 0, m
    while count > keep:
        count -= min(step, count - keep, (count + 1) // 2)
        done += 1
    return left[done % 2, :keep].long()
