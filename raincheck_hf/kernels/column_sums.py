# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Column means of softmax(q kᵀ·scale), which never exists. Twin: `models.vision` in blocks.

With s_ij = scale·q_i·k_j, column j receives Σ_i exp(s_ij − m_i), m_i = log Σ_j exp(s_ij). Neither
sum needs more of the map than a tile: one pass over the tiles finds m, another one the columns. Who
has m from the attention itself spares the first. Heads are written apart and added up afterwards,
so that the order of all sums is fixed.

A tile is added up as far as a thread holds neighbours of a row (`_folded`), and the threads' shares
at the end: no more than a tile of products is in registers, and two programs share a processor, one
multiplying while the other takes exponentials.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from raincheck_hf.kernels.segments import block_table, split_width

_LOG2_E = 1.4426950408889634


@triton.jit
def _across(
    rows, part, place, fits, pitch, WIDTH: tl.constexpr, END: tl.constexpr, LAST: tl.constexpr
):
    """Columns `part`, all below END, of rows at `place`, as [parts, places]; zero from WIDTH on.

    Only a segment's last tile, where LAST, asks which rows fit.
    """
    at = rows + place[None, :] * pitch + part[:, None]
    if LAST:
        return tl.load(at, mask=fits[None, :] & (part < WIDTH)[:, None], other=0.0)
    if END > WIDTH:
        return tl.load(at, mask=(part < WIDTH)[:, None], other=0.0)
    return tl.load(at)


@triton.jit
def _scores(
    rows, head, tail, place, fits, pitch,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, LAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q kᵀ fp32 [own, others] of own rows at hand with others in memory."""
    part = tl.arange(0, HEAD)
    others = _across(rows, part, place, fits, pitch, WIDTH, HEAD, LAST)
    scores = tl.dot(head, others, input_precision=PRECISION)
    if TAIL > 0:
        rest = HEAD + tl.arange(0, TAIL)
        others = _across(rows, rest, place, fits, pitch, WIDTH, HEAD + TAIL, LAST)
        scores = tl.dot(tail, others, scores, input_precision=PRECISION)
    return scores


@triton.jit
def _own(rows, place, fits, pitch, WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """A block's own rows: the first HEAD columns, and the TAIL ones behind them."""
    part = tl.arange(0, HEAD)
    own = rows + place[:, None] * pitch
    head = tl.load(own + part[None, :], mask=fits[:, None] & (part < WIDTH)[None, :], other=0.0)
    tail = head
    if TAIL > 0:
        rest = HEAD + tl.arange(0, TAIL)
        tail = tl.load(own + rest[None, :], mask=fits[:, None] & (rest < WIDTH)[None, :], other=0.0)
    return head, tail


@triton.jit
def _folded(tile):
    """[ROWS, OTHERS] as [ROWS, 8]: sums of every eighth column, which one thread holds."""
    rows: tl.constexpr = tile.shape[0]
    others: tl.constexpr = tile.shape[1]
    return tl.sum(tl.reshape(tile, (rows, others // 8, 8)), 1)


@triton.jit
def _more_total(most, total, scores, scale):
    """The running maximum [ROWS] and sum of powers [ROWS, 8], with a tile more; scale above 0."""
    high = tl.maximum(most, tl.max(scores, 1) * scale)
    total = total * tl.exp2(most - high)[:, None] + _folded(tl.exp2(scores * scale - high[:, None]))
    return high, total


@triton.jit
def _normalisers(
    query, key, blocks, normaliser, patches, pitch, scale,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
    OTHERS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """m_i in powers of 2 for ROWS queries of one head.

    Args:
        query, key: [N, H, WIDTH], rows ``pitch`` apart, heads one behind the other.
        blocks: int32 [blocks, 3], where a block and its segment start, and where the segment ends.
        normaliser: fp32 [H, N], written.
        scale: fp32, above 0, of scores in powers of 2.
    """
    blocks += tl.program_id(0) * 3
    first, start, stop = tl.load(blocks), tl.load(blocks + 1), tl.load(blocks + 2)
    page = tl.program_id(1).to(tl.int64) * patches + start
    skipped = start.to(tl.int64) * pitch + tl.program_id(1) * WIDTH
    query += skipped
    key += skipped
    length = stop - start
    place = first - start + tl.arange(0, ROWS)
    head, tail = _own(query, place, place < length, pitch, WIDTH, HEAD, TAIL)
    most = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, 8], tl.float32)
    whole = length // OTHERS * OTHERS
    for at in range(0, whole, OTHERS):
        other = at + tl.arange(0, OTHERS)
        scores = _scores(
            key, head, tail, other, other < length, pitch, WIDTH, HEAD, TAIL, False, PRECISION
        )
        most, total = _more_total(most, total, scores, scale)
    if whole < length:
        other = whole + tl.arange(0, OTHERS)
        fits = other < length
        scores = _scores(key, head, tail, other, fits, pitch, WIDTH, HEAD, TAIL, True, PRECISION)
        scores = tl.where(fits[None, :], scores, -float("inf"))
        most, total = _more_total(most, total, scores, scale)
    tl.store(normaliser + page + place, most + tl.log2(tl.sum(total, 1)), mask=place < length)


@triton.jit
def _columns(
    query, key, blocks, normaliser, received, patches, pitch, scale,
    WIDTH: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
    OTHERS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What ROWS keys of one head receive, a mean over queries; see `_normalisers`.

    Args:
        received: fp32 [H, N], written.
    """
    blocks += tl.program_id(0) * 3
    first, start, stop = tl.load(blocks), tl.load(blocks + 1), tl.load(blocks + 2)
    page = tl.program_id(1).to(tl.int64) * patches + start
    skipped = start.to(tl.int64) * pitch + tl.program_id(1) * WIDTH
    query += skipped
    key += skipped
    normaliser += page
    length = stop - start
    place = first - start + tl.arange(0, ROWS)
    head, tail = _own(key, place, place < length, pitch, WIDTH, HEAD, TAIL)
    shares = tl.zeros([ROWS, 8], tl.float32)
    whole = length // OTHERS * OTHERS
    for at in range(0, whole, OTHERS):
        other = at + tl.arange(0, OTHERS)
        past = tl.load(normaliser + other)
        scores = _scores(
            query, head, tail, other, other < length, pitch, WIDTH, HEAD, TAIL, False, PRECISION
        )
        shares += _folded(tl.exp2(scores * scale - past[None, :]))
    if whole < length:
        other = whole + tl.arange(0, OTHERS)
        fits = other < length
        # An infinite normaliser leaves nothing of a query that is not there.
        past = tl.load(normaliser + other, mask=fits, other=float("inf"))
        scores = _scores(query, head, tail, other, fits, pitch, WIDTH, HEAD, TAIL, True, PRECISION)
        shares += _folded(tl.exp2(scores * scale - past[None, :]))
    tl.store(received + page + place, tl.sum(shares, 1) / length, mask=place < length)


def column_means(
    query: Tensor,
    key: Tensor,
    lengths: Sequence[int],
    scale: float,
    *,
    normaliser: Tensor | None = None,
    rows: int | None = None,
    others: int | None = None,
    warps: int = 4,
    stages: int = 3,
    registers: int | None = None,
) -> Tensor:
    """Mean attention that each patch receives from the patches of its own segment.

    Products of bf16 or fp16 numbers are exact in fp32, where they are added up; fp32 numbers are
    multiplied as such. Memory beside query and key: two words a patch and head.

    Args:
        query: [N, H, e], bf16, fp16 or fp32, e ≤ 256. Heads one behind the other, as in a joint
            projection, are read where they are.
        key: likewise.
        lengths: patches of each segment, adding up to N; each at least 1.
        scale: of the scores, above 0.
        normaliser: fp32 [H, N], log2 Σ_j exp(s_ij), which `vision_attention.attend` may have
            written; None finds it, which takes as long as the rest.
        rows: of a program's own, a power of two, 16 or more.
        others: in flight at once, likewise.
        warps: of a program.
        stages: tiles under way.
        registers: of a thread at most, so that more programs share a processor; None sets no bound.

    Returns:
        fp32 [N], mean over heads and over the segment's queries; each segment adds up to 1.

    Raises:
        ValueError: shapes or dtypes are not as above, the scale is not above 0, or lengths do not
            add up.
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
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")
    if normaliser is not None and (
        normaliser.shape != (heads, patches)
        or normaliser.dtype != torch.float32
        or not normaliser.is_contiguous()
    ):
        raise ValueError(
            f"normaliser must be contiguous fp32 {[heads, patches]}, got {normaliser.dtype} "
            f"{list(normaliser.shape)}"
        )
    if patches == 0:
        return query.new_zeros(0, dtype=torch.float32)
    first, rest = split_width(width)
    rows = rows or (128 if half else 64)
    others = others or (64 if half else 32)
    if query.stride()[1:] != (width, 1) or key.stride() != query.stride():
        query, key = query.contiguous(), key.contiguous()
    blocks = block_table(lengths, rows, query.device)
    received = torch.empty(heads, patches, dtype=torch.float32, device=query.device)
    shapes = {
        "WIDTH": width,
        "HEAD": first,
        "TAIL": rest,
        "ROWS": rows,
        "OTHERS": others,
        "PRECISION": "ieee",
    }
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    common = (patches, query.stride(0), scale * _LOG2_E)
    grid = (len(blocks), heads)
    with torch.cuda.device_of(query):
        if normaliser is None:
            normaliser = torch.empty_like(received)
            _normalisers[grid](query, key, blocks, normaliser, *common, **shapes, **options)
        _columns[grid](query, key, blocks, normaliser, received, *common, **shapes, **options)
    return received.mean(0)
