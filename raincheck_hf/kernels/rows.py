# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Fetching a captured pass's input rows from where they wait.

Deferred rows are held in small blocks (`DeferredRows`), and a decode row is a token id on the
device. So that no copy has to be launched before a replay, the graph itself collects them: the
descriptor has one line of addresses for each chunk row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from raincheck_hf.kernels.descriptor import CHUNK, POSITION, TOKEN, TOKEN_ID

# A chunk row's line: addresses of its embedding [d], of its first position and of its row of each
# DeepStack layer [d]; and how many entries apart the three positions are.
EMBED_AT = tl.constexpr(0)
POSITION_AT = tl.constexpr(1)
POSITION_STEP = tl.constexpr(2)
DEEPSTACK_AT = tl.constexpr(3)


@triton.jit
def _gather(
    header, lines, line, table, embeds, positions, rows, capacity, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: embedding and positions; zeros where the row is not in use.

    Args:
        lines: int64 [capacity, line], see above.
        table: [vocabulary, width], the embedding table.
        embeds: [rows, width], written.
        positions: int64 [3, rows], written.
    """
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    axis = tl.arange(0, 4)
    used = row < tl.load(header + CHUNK)
    where = tl.load(header + POSITION + axis, mask=axis < 3, other=0)
    source = table
    if row == capacity:
        used = tl.load(header + TOKEN) == 1
        if used:
            token = tl.load(tl.load(header + TOKEN_ID).to(tl.pointer_type(tl.int64)))
            source = table + token * width
    elif used:
        mine = lines + row * line
        source = tl.load(mine + EMBED_AT).to(table.dtype)
        first = tl.load(mine + POSITION_AT).to(tl.pointer_type(tl.int64))
        where = tl.load(first + axis * tl.load(mine + POSITION_STEP), mask=axis < 3, other=0)
    value = tl.load(source + at, mask=(at < width) & used, other=0.0)
    tl.store(embeds + row.to(tl.int64) * width + at, value, mask=at < width)
    if tl.program_id(1) == 0:
        tl.store(positions + axis * rows + row, tl.where(used, where, 0), mask=axis < 3)


@triton.jit
def _add_deepstack(header, lines, line, layer, x, width, BLOCK: tl.constexpr):
    """x[row] += the row's DeepStack features of one layer, for the chunk rows in use."""
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < width) & (row < tl.load(header + CHUNK))
    here = x + row.to(tl.int64) * width + at
    source = tl.load(lines + row * line + DEEPSTACK_AT + layer).to(x.dtype)
    more = tl.load(source + at, mask=inside, other=0.0)
    tl.store(here, tl.load(here, mask=inside, other=0.0) + more, mask=inside)


def gather(
    header: Tensor,
    lines: Tensor,
    table: Tensor,
    embeds: Tensor,
    positions: Tensor,
) -> None:
    """Collect a pass's rows: ``capacity`` chunk rows, and the decode row behind them.

    Args:
        header: int64, see `descriptor`.
        lines: int64 [capacity, 3 + DeepStack layers], contiguous.
        table: [vocabulary, d], the embedding table, contiguous.
        embeds: [capacity + 1, d], written.
        positions: int64 [3, capacity + 1], written.
    """
    rows, width = embeds.shape
    block = min(1024, triton.next_power_of_2(width))
    with torch.cuda.device_of(embeds):
        _gather[(rows, triton.cdiv(width, block))](
            header, lines, lines.shape[1], table, embeds, positions, rows, rows - 1, width,
            BLOCK=block, num_warps=4,
        )  # fmt: skip


def add_deepstack(header: Tensor, lines: Tensor, layer: int, x: Tensor) -> None:
    """Add DeepStack layer ``layer``'s features to the chunk rows of x [capacity + 1, d]."""
    width = x.shape[1]
    block = min(1024, triton.next_power_of_2(width))
    with torch.cuda.device_of(x):
        _add_deepstack[(len(lines), triton.cdiv(width, block))](
            header, lines, lines.shape[1], layer, x, width,
            BLOCK=block, num_warps=4,
        )  # fmt: skip


def gather_plain(
    embeds: list[Tensor], positions: list[Tensor], token: Tensor | None, capacity: int
) -> tuple[Tensor, Tensor]:
    """Twin of `gather`: rows in use (and the token's, or None) padded with zeros to capacity + 1.

    Args:
        embeds: The chunk rows, [d] each, and the token's last, if there is one.
        positions: int64 [3] each, likewise.
        token: int64 [1], or None where there is no decode row.
        capacity: Chunk rows at most.
    """
    chunk = len(embeds) - (token is not None)
    out = embeds[0].new_zeros(capacity + 1, len(embeds[0]))
    where = positions[0].new_zeros(3, capacity + 1)
    for row in range(chunk):
        out[row], where[:, row] = embeds[row], positions[row]
    if token is not None:
        out[capacity], where[:, capacity] = embeds[-1], positions[-1]
    return out, where
