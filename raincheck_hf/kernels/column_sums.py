# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Column means of softmax(q kᵀ·scale), which never exists. Twin: `models.vision` in blocks.

With s_ij = scale·q_i·k_j, column j receives Σ_i exp(s_ij − m_i), m_i = log Σ_j exp(s_ij). Neither
sum needs more of the map than a tile: one pass over the tiles finds m, another one the columns.
Heads are written apart and added up afterwards, so that the order of all sums is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634


@triton.jit
def _scores(
    rows, head, tail, place, fits, pitch, HEAD: tl.constexpr, TAIL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q kᵀ fp32 [own, others] of own rows in registers with others in memory."""
    part = tl.arange(0, HEAD)
    others = rows + place[None, :] * pitch
    scores = tl.dot(
        head,
        tl.load(others + part[:, None], mask=fits[None, :], other=0.0),
        input_precision=PRECISION,
    )
    if TAIL > 0:
        rest = HEAD + tl.arange(0, TAIL)
        scores = tl.dot(
            tail,
            tl.load(others + rest[:, None], mask=fits[None, :], other=0.0),
            scores,
            input_precision=PRECISION,
        )
    return scores


@triton.jit
def _own(rows, place, fits, pitch, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """A block's own rows: the first HEAD columns, and the TAIL ones behind them."""
    part = tl.arange(0, HEAD)
    own = rows + place[:, None] * pitch
    head = tl.load(own + part[None, :], mask=fits[:, None], other=0.0)
    tail = head
    if TAIL > 0:
        rest = HEAD + tl.arange(0, TAIL)
        tail = tl.load(own + rest[None, :], mask=fits[:, None], other=0.0)
    return head, tail


@triton.jit
def _normalisers(
    query, key, blocks, normaliser, patches, pitch, scale,
    HEAD: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """m_i in powers of 2 for ROWS queries of one head.

    Args:
        query, key: [H, N, pitch], zero behind the head's width.
        blocks: int32 [blocks, 3], where a block and its segment start, and where the segment ends.
        normaliser: fp32 [H, N], written.
        scale: fp32, of scores in powers of 2.
    """
    blocks += tl.program_id(0) * 3
    first, start, stop = tl.load(blocks), tl.load(blocks + 1), tl.load(blocks + 2)
    page = tl.program_id(1).to(tl.int64) * patches
    place = first + tl.arange(0, ROWS)
    head, tail = _own(query + page * pitch, place, place < stop, pitch, HEAD, TAIL)
    most = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for at in range(start, stop, OTHERS):
        other = at + tl.arange(0, OTHERS)
        fits = other < stop
        scores = _scores(key + page * pitch, head, tail, other, fits, pitch, HEAD, TAIL, PRECISION)
        scores = tl.where(fits[None, :], scores * scale, -float("inf"))
        high = tl.maximum(most, tl.max(scores, 1))
        total = total * tl.exp2(most - high) + tl.sum(tl.exp2(scores - high[:, None]), 1)
        most = high
    tl.store(normaliser + page + place, most + tl.log2(total), mask=place < stop)


@triton.jit
def _columns(
    query, key, blocks, normaliser, received, patches, pitch, scale,
    HEAD: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What ROWS keys of one head receive, a mean over queries; see `_normalisers`.

    Args:
        received: fp32 [H, N], written.
    """
    blocks += tl.program_id(0) * 3
    first, start, stop = tl.load(blocks), tl.load(blocks + 1), tl.load(blocks + 2)
    page = tl.program_id(1).to(tl.int64) * patches
    place = first + tl.arange(0, ROWS)
    head, tail = _own(key + page * pitch, place, place < stop, pitch, HEAD, TAIL)
    shares = tl.zeros([ROWS, OTHERS], tl.float32)
    for at in range(start, stop, OTHERS):
        other = at + tl.arange(0, OTHERS)
        fits = other < stop
        # An infinite normaliser leaves nothing of a query that is not there.
        past = tl.load(normaliser + page + other, mask=fits, other=float("inf"))
        scores = _scores(
            query + page * pitch, head, tail, other, fits, pitch, HEAD, TAIL, PRECISION
        )
        shares += tl.exp2(scores * scale - past[None, :])
    mean = tl.sum(shares, 1) / (stop - start)
    tl.store(received + page + place, mean, mask=place < stop)


def column_means(
    query: Tensor,
    key: Tensor,
    lengths: Sequence[int],
    scale: float,
    *,
    rows: int | None = None,
    others: int | None = None,
    warps: int = 8,
    stages: int = 3,
) -> Tensor:
    """Mean attention that each patch receives from the patches of its own segment.

    Products of bf16 or fp16 numbers are exact in fp32, where they are added up; fp32 numbers are
    multiplied as such. Memory beside query and key: a copy of each, and two words a patch and head.

    Args:
        query: [N, H, e], bf16, fp16 or fp32, e ≤ 256.
        key: likewise.
        lengths: patches of each segment, adding up to N; each at least 1.
        scale: of the scores.
        rows: of a program's own, a power of two, 16 or more.
        others: in flight at once, likewise.
        warps: of a program.
        stages: tiles under way.

    Returns:
        fp32 [N], mean over heads and over the segment's queries; each segment adds up to 1.

    Raises:
        ValueError: shapes or dtypes are not as above, or lengths do not add up.
    """
    half = query.dtype in (torch.bfloat16, torch.float16)
    if query.ndim != 3 or query.shape != key.shape or not 1 <= query.shape[2] <= 256:
        raise ValueError(
            "query and key must both be [N, H, e] with e at most 256, got "
            f"{list(query.shape)} and {list(key.shape)}"
        )
    if query.dtype != key.dtype or not (half or query.dtype == torch.float32):
        raise ValueError(
            f"query and key must share bf16, fp16 or fp32, got {query.dtype} and {key.dtype}"
        )
    patches, heads, width = query.shape
    if sum(lengths) != patches or min(lengths, default=1) < 1:
        raise ValueError(f"lengths must be 1 or more and add up to {patches}, got {list(lengths)}")
    if patches == 0:
        return query.new_zeros(0, dtype=torch.float32)
    first = max(16, 1 << (width.bit_length() - 1))
    rest = 0 if width <= first else max(16, triton.next_power_of_2(width - first))
    rows = rows or (128 if half else 64)
    others = others or (128 if half else 32)
    query, key = (_by_head(x, first + rest) for x in (query, key))
    blocks = _blocks(lengths, rows, query.device)
    normaliser = torch.empty(heads, patches, dtype=torch.float32, device=query.device)
    received = torch.empty_like(normaliser)
    shapes = {
        "HEAD": first,
        "TAIL": rest,
        "ROWS": rows,
        "OTHERS": others,
        "PRECISION": "ieee",
    }
    options = {"num_warps": warps, "num_stages": stages} if query.is_cuda else {}
    common = (patches, first + rest, scale * _LOG2_E)
    grid = (len(blocks), heads)
    with torch.cuda.device_of(query):
        _normalisers[grid](query, key, blocks, normaliser, *common, **shapes, **options)
        _columns[grid](query, key, blocks, normaliser, received, *common, **shapes, **options)
    return received.mean(0)


def _by_head(rows: Tensor, pitch: int) -> Tensor:
    """[N, H, e] as [H, N, pitch], zero where there was nothing: rows start at whole 32 bytes."""
    laid = rows.new_zeros(rows.shape[1], rows.shape[0], pitch)
    laid[..., : rows.shape[2]].copy_(rows.transpose(0, 1))
    return laid


def _blocks(lengths: Sequence[int], rows: int, device: torch.device) -> Tensor:
    """int32 [blocks, 3]: where a block starts, where its segment starts, and where it ends."""
    table, start = [], 0
    for length in lengths:
        stop = start + length
        table += [(first, start, stop) for first in range(start, stop, rows)]
        start = stop
    return torch.tensor(table, dtype=torch.int32).to(device)
