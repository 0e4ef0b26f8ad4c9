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
    similar, left, nearest, kept, board, n, keep, step,
    BLOCKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rounds of three stages, a grid-wide barrier after each; tokens are dealt over the blocks.

    Args:
        similar: fp32 [n, n].
        left: int32 [2, n], two pages, the tokens left: page 0 holds 0 ... n − 1 at the start, and
            after round i page i modulo 2 holds the result.
        nearest: fp32 [n], scratch.
        kept: int32 [n], scratch.
        board: see `best_of_grid`.
        step: tokens to drop in a round.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, WIDE)
    token = tl.zeros((), tl.int64)
    count = n + block * 0
    turn = 0
    while count > keep:
        firsts = (count + 1) // 2
        seconds = count // 2
        page = left + turn // 3 % 2 * n
        following = left + (turn // 3 + 1) % 2 * n
        drop = tl.minimum(tl.minimum(step, count - keep), firsts)
        for i in range(block, firsts, BLOCKS):
            row = similar + tl.load(page + 2 * i, cache_modifier=".cg").to(tl.int64) * n
            most = tl.full([WIDE], -float("inf"), tl.float32)
            for start in range(0, seconds, WIDE):
                j = start + lane
                inside = j < seconds
                other = tl.load(page + 2 * j + 1, mask=inside, other=0, cache_modifier=".cg")
                value = tl.load(row + other, mask=inside, other=-float("inf"))
                most = tl.maximum(most, value)
            tl.store(nearest + i, tl.max(most, 0))
        best_of_grid(token, board, turn, BLOCKS, "release")

        for i in range(block, firsts, BLOCKS):
            own = tl.load(nearest + i, cache_modifier=".cg")
            ahead = tl.zeros([WIDE], tl.int32)
            for start in range(0, firsts, WIDE):
                j = start + lane
                value = tl.load(
                    nearest + j, mask=j < firsts, other=-float("inf"), cache_modifier=".cg"
                )
                nearer = (value > own) | ((value == own) & (j < i))
                ahead += (nearer & (j < firsts)).to(tl.int32)
            tl.store(kept + i, (tl.sum(ahead, 0) >= drop).to(tl.int32))
        best_of_grid(token, board, turn + 1, BLOCKS, "release")

        for i in range(block, firsts, BLOCKS):
            before = tl.zeros([WIDE], tl.int32)
            for start in range(0, i, WIDE):
                j = start + lane
                before += tl.load(kept + j, mask=j < i, other=0, cache_modifier=".cg")
            place = i + tl.sum(before, 0)  # i seconds lie before first i
            stays = tl.load(kept + i, cache_modifier=".cg")
            first = tl.load(page + 2 * i, cache_modifier=".cg")
            tl.store(following + place, first, mask=stays > 0)
            second = tl.load(page + 2 * i + 1, mask=i < seconds, other=0, cache_modifier=".cg")
            tl.store(following + place + stays, second, mask=i < seconds)
        best_of_grid(token, board, turn + 2, BLOCKS, "release")
        count -= drop
        turn += 3


def thinned(similar: Tensor, keep: int, rounds: int, *, warps: int = 8) -> Tensor:
    """As `greedy.thinned`, in one launch and without waiting for it.

    Args:
        similar: fp32 [n, n], contiguous, symmetric.
        keep: 1 ≤ keep ≤ n.
        rounds: about how many to need.
        warps: of a block.

    Raises:
        ValueError: a shape, dtype or stride is not as above, or keep is out of range.
    """
    check_matrix(similar, "similar", square=True)
    n, device = len(similar), similar.device
    if not 1 <= keep <= n:
        raise ValueError(f"keep must be 1 to {n}, got {keep}")
    if keep == n:
        return torch.arange(n, device=device)
    step = per_round(n, keep, rounds)
    blocks = grid_size(similar, n)
    left = torch.arange(n, dtype=torch.int32, device=device).repeat(2, 1)
    with torch.cuda.device_of(similar):
        _thinned[(blocks,)](
            similar,
            left,
            torch.empty(n, dtype=torch.float32, device=device),
            torch.empty(n, dtype=torch.int32, device=device),
            new_board(blocks, device),
            n,
            keep,
            step,
            BLOCKS=blocks,
            WIDE=256 if n <= 2048 else 1024,
            **launch_options(similar, warps),
        )
    done, count = 0, n
    while count > keep:
        count -= min(step, count - keep, (count + 1) // 2)
        done += 1
    return left[done % 2, :keep].long()
