# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Blocks of one kernel that agree on the best candidate, pick after pick, without leaving it.

The blocks of a grid each own some tokens. At every pick each writes its best candidate to a board,
one word, and waits until all have written: the words are also the barrier. All blocks must be
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
    return _LAST - (word & _LAST)


@triton.jit
def key_of(word):
    """The key in a word that is not -1."""
    return word >> 20


@triton.jit
def best_of_grid(word, board, turn, BLOCKS: tl.constexpr, SEM: tl.constexpr):
    """The largest word of all blocks, int64; every block gets the same answer.

    What a block writes to the board ends in the turn's tag, so that a reader knows it from the
    turn before. Turns alternate between two pages: a block writes turn t + 2 once all have written
    t + 1, and they did that after reading t. Two tags tell t and t + 2 apart, and neither is 0,
    the empty board.

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


def new_board(blocks: int, device: torch.device) -> Tensor:
    """An empty board for one launch."""
    return torch.zeros(2, blocks, dtype=torch.int64, device=device)


def launch_options(tokens: Tensor, warps: int) -> dict[str, Any]:
    """Keyword arguments of a launch whose blocks wait for each other."""
    return {"num_warps": warps, "launch_cooperative_grid": True} if tokens.is_cuda else {}


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
