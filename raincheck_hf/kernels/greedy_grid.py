# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Blocks of one kernel that agree on the best candidate, pick after pick, without leaving it.

The blocks of a grid each own some tokens. At every turn each writes its best candidates to a board,
a word each, and waits until all have written: the words are also the barrier. All blocks must be
resident at once, so they are launched cooperatively.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = 1 << 20
"""Tokens that a word can tell apart."""

_LAST = tl.constexpr(LARGEST - 1)
_WAIT = tl.constexpr(1 << 62)
_HALF = tl.constexpr((1 << 32) - 1)
_SIGN = tl.constexpr(-(1 << 31))


@triton.jit
def candidates(key, place, open_):
    """Words that compare by key, then by place, smaller first; -1 where a token is not open.

    Args:
        key: int64 [W], 0 or more, below 2^41.
        place: int32 [W], below 2^20.
        open_: bool [W].
    """
    return tl.where(open_, key * (_LAST + 1) + (_LAST - place), -1)


@triton.jit
def place_of(word):
    """The place in a word that is not -1."""
    return (word & _LAST) ^ _LAST


@triton.jit
def key_of(word):
    """The key in a word that is not -1."""
    return word >> 20


@triton.jit
def largest(words):
    """The largest of int64 words that one warp holds: two reductions of 32 bits, fast ones."""
    high = (words >> 32).to(tl.int32)
    top = tl.max(high, 0)
    low = tl.where(high == top, words.to(tl.int32) ^ _SIGN, _SIGN)
    return (top.to(tl.int64) << 32) | ((tl.max(low, 0) ^ _SIGN).to(tl.int64) & _HALF)


@triton.jit
def best_words(words, PLACES: tl.constexpr):
    """The largest words, best first, int64 [PLACES]; -1 where there are no more."""
    place = tl.arange(0, PLACES)
    best = tl.full([PLACES], -1, tl.int64)
    for i in tl.static_range(PLACES):
        one = largest(words)
        best = tl.where(place == i, one, best)
        words = tl.where(words == one, -1, words)
    return best


@triton.jit
def best_of_grid(word, board, turn, BLOCKS: tl.constexpr, SEM: tl.constexpr):
    """The largest word of all blocks, int64; every block gets the same answer.

    What a block writes to the board ends in the turn's tag, so that a reader knows it from the
    turn before. Turns alternate between two pages: a block writes turn t + 2 once all have written
    t + 1, and they did that after reading t. Two tags tell t and t + 2 apart, and neither is 0,
    the empty board. The number that ends the loop, which all warps share, is the answer itself.

    Args:
        word: int64 [], this block's, from -1 to 2^61 - 1.
        board: int64 [2, BLOCKS], zero at the start of the kernel.
        turn: int, counted from 0.
        BLOCKS: size of the grid, a power of two.
        SEM: "release" where blocks read afterwards what others wrote to memory before (around the
            first-level cache: `.cg`); else "relaxed".
    """
    tag = 1 + (turn // 2) % 2
    page = board + (turn % 2) * BLOCKS
    tl.debug_barrier()
    tl.atomic_xchg(page + tl.program_id(0), word * 4 + tag, sem=SEM)
    slot = tl.arange(0, BLOCKS)
    best = tl.full((), _WAIT, tl.int64)
    while best == _WAIT:
        words = tl.load(page + slot, volatile=True)
        best = tl.max(tl.where((words & 3) == tag, words >> 2, _WAIT), 0)
    return best


@triton.jit
def words_of_grid(best, board, turn, BLOCKS: tl.constexpr, AGAIN: tl.constexpr, SEM: tl.constexpr):
    """The words of all blocks, each block's one behind the other; every block gets the same.

    Args:
        best: int64 [PLACES], this block's, from -1 to 2^61 - 1.
        board: int64 [2, BLOCKS·PLACES], zero at the start of the kernel.
        turn, SEM: see `best_of_grid`.
        AGAIN: see `read_again`.
    """
    places: tl.constexpr = best.shape[0]
    tag = 1 + (turn // 2) % 2
    page = board + (turn % 2) * (BLOCKS * places)
    tl.debug_barrier()
    tl.atomic_xchg(page + tl.program_id(0) * places + tl.arange(0, places), best * 4 + tag, sem=SEM)
    slot = tl.arange(0, BLOCKS * places)
    words = tl.zeros([BLOCKS * places], tl.int64)
    rounds = 1 + AGAIN
    while rounds > 0:
        words = tl.load(page + slot, volatile=True)
        rounds += tl.max(((words & 3) != tag).to(tl.int32), 0) - 1
    return words >> 2


@triton.jit
def leaders_of_grid(
    first, second, board, turn, AHEAD: tl.constexpr, BLOCKS: tl.constexpr, AGAIN: tl.constexpr
):
    """The best words of all groups that nothing unseen can beat; every block gets the same answer.

    A block has GROUPS groups of tokens. A group's best that is above every group's second is above
    all that was not written, too. Nothing but the board is read that another block wrote, so that
    no order is asked for.

    Args:
        first: int64 [GROUPS], the best word of each group; -1 where nothing is open.
        second: int64 [GROUPS], the next best.
        board, turn, BLOCKS, AGAIN: see `words_of_grid`, with two words a group.
        AHEAD: how many at most, a power of two, at most GROUPS·BLOCKS.

    Returns:
        int64 [AHEAD], best first, -1 from where there are no more; at least one unless all are -1.
    """
    groups: tl.constexpr = first.shape[0]
    both = tl.reshape(tl.join(first, second), (2 * groups,))
    words = words_of_grid(both, board, turn, BLOCKS, AGAIN, "relaxed")
    firsts, seconds = tl.split(tl.reshape(words, (BLOCKS * groups, 2)))
    firsts = tl.where(firsts > tl.max(seconds, 0), firsts, -1)
    # Words differ, so that ranks do; those that are out share one that is never asked for. Both
    # tables have the slots along a warp, so that ranks stay where they were counted.
    rank = tl.sum((firsts[:, None] > firsts[None, :]).to(tl.int32), 0)
    rank = tl.where(firsts >= 0, rank, AHEAD)
    asked = rank[None, :] == tl.arange(0, AHEAD)[:, None]
    return tl.max(tl.where(asked, firsts[None, :], -1), 1)


@triton.jit
def pool_of_grid(best, board, turn, POOL: tl.constexpr, BLOCKS: tl.constexpr, AGAIN: tl.constexpr):
    """Some of the best tokens of all blocks, the best of all among them; the same everywhere.

    A block publishes its best words. The last of them stands for all that it did not publish: what
    is above the largest last word is above all that nobody sees. Where that is more than a pool
    holds, a higher bound is searched for by halves.

    Args:
        best: int64 [PLACES], best first, see `best_words`.
        board, turn, BLOCKS, AGAIN: see `words_of_grid`, which releases.

    Returns:
        pool, int32 [POOL]: tokens, in no order; -1 from where there are no more.
        most, int64: the largest word, -1 where nothing is open.
        bound, int64: no token outside of the pool has a larger word.
    """
    places: tl.constexpr = best.shape[0]
    slots: tl.constexpr = BLOCKS * places
    words = words_of_grid(best, board, turn, BLOCKS, AGAIN, "release")
    slot = tl.arange(0, slots)
    most = tl.max(words, 0)
    bound = tl.max(tl.where(slot % places == places - 1, words, -1), 0)
    upto = tl.cumsum((words > bound).to(tl.int32), 0)
    if tl.max(upto, 0) > POOL:
        high = most - 1
        for _ in tl.static_range(4):
            middle = (bound + high) >> 1
            fits = tl.sum((words > middle).to(tl.int32), 0) <= POOL
            high = tl.where(fits, middle, high)
            bound = tl.where(fits, bound, middle)
        bound = high
        upto = tl.cumsum((words > bound).to(tl.int32), 0)
    at = tl.sum((upto[None, :] <= tl.arange(0, POOL)[:, None]).to(tl.int32), 1)
    found = at < slots
    tokens = place_of(words).to(tl.int32)
    return tl.where(found, tl.gather(tokens, tl.where(found, at, 0), 0), -1), most, bound


@triton.jit
def _least_and_sum(one, other):
    """The smaller of the upper halves, the sum of the lower ones."""
    least = tl.minimum(one >> 32, other >> 32)
    return (least << 32) | ((one & _HALF) + (other & _HALF))


@triton.jit
def total_of_grid(count, limit, board, turn, BLOCKS: tl.constexpr):
    """The sum of all blocks' counts and the least of their limits; and a barrier.

    After it, a block reads what others wrote to memory before (around the first-level cache:
    `.cg`). Sum and limit come out of one reduction, which also ends the loop: see `best_of_grid`.

    Args:
        count, limit: int32 [], this block's, 0 or more; counts add up to less than 2^31.
        board: int64 [2, BLOCKS], zero at the start of the kernel.
        turn: int, counted from 0.
        BLOCKS: size of the grid, a power of two.

    Returns:
        count, limit: int32 [].
    """
    tag = 1 + (turn // 2) % 2
    page = board + (turn % 2) * BLOCKS
    word = (limit.to(tl.int64) << 32) | count
    tl.debug_barrier()
    tl.atomic_xchg(page + tl.program_id(0), word * 4 + tag, sem="release")
    slot = tl.arange(0, BLOCKS)
    both = tl.full((), -1, tl.int64)
    while both < 0:
        words = tl.load(page + slot, volatile=True)
        seen = tl.where((words & 3) == tag, words >> 2, -_HALF - 1)
        both = tl.reduce(seen, 0, _least_and_sum)
    return (both & _HALF).to(tl.int32), (both >> 32).to(tl.int32)


@cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def grid_size(tokens: Tensor, n: int, least: int = 16) -> int:
    """Blocks for n tokens: a power of two, resident at once, with `least` tokens each if it can.

    One block where kernels are interpreted on a CPU: blocks then run one after the other.
    """
    if not tokens.is_cuda:
        return 1
    most = _processors(tokens.get_device())
    return 1 << (max(1, min(most, n // least)).bit_length() - 1)


def read_again(words: int, warps: int) -> int:
    """Whether words must be read once more after all were seen, 0 or 1.

    Where a block has more threads than there are words, several warps load a word, each at its own
    moment, and one of them answers for it when warps put together what they saw. The others may
    hold what was there before.
    """
    return int(words < 32 * warps)


def new_board(words: int, device: torch.device) -> Tensor:
    """An empty board for one launch, with so many words a turn."""
    return torch.zeros(2, words, dtype=torch.int64, device=device)


def launch_options(tokens: Tensor, warps: int, **more: Any) -> dict[str, Any]:
    """Keyword arguments of a launch whose blocks wait for each other; none for the interpreter."""
    if not tokens.is_cuda:
        return {}
    return {"num_warps": warps, "launch_cooperative_grid": True, **more}


def check_matrix(matrix: Tensor, name: str, square: bool) -> None:
    """Refuse what a kernel would read wrongly.

    Raises:
        ValueError: not a contiguous fp32 matrix, not square where it must be, or too large.
    """
    fits = matrix.ndim == 2 and matrix.dtype == torch.float32 and matrix.is_contiguous()
    if not fits or 0 in matrix.shape or (square and matrix.shape[0] != matrix.shape[1]):
        shape = "[n, n]" if square else "[r, n]"
        raise ValueError(
            f"{name} must be contiguous fp32 {shape}, got {matrix.dtype} {list(matrix.shape)} "
            f"with strides {matrix.stride()}"
        )
    if max(matrix.shape) > LARGEST:
        raise ValueError(f"{name} must have at most {LARGEST} rows and columns")
