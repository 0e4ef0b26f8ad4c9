# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Column means of softmax(q kᵀ·scale), which never exists. Twin: `models.vision` in blocks.

With s_ij = scale·q_i·k_j, column j receives Σ_i exp(s_ij − m_i), m_i = log Σ_j exp(s_ij). Neither
sum needs more of the map than a tile: one pass over the tiles finds m, another one the columns. Who
has m from the attention itself spares the first. Heads are written apart and added up afterwards,
so that the order of all sums is fixed.

A program keeps rows of its own and meets all others of their segment tile by tile, which from
Hopper on are copied by descriptor where they lie as it asks. Either pass has queries down and keys
across in its tiles and adds a tile up as far as a thread holds neighbours (`_folded_keys`,
`_folded_queries`), the threads' shares at the end: no more than a tile of products is in registers,
and four programs share a processor, some multiplying while others take exponentials. A thread
holds few queries and many keys of a tile, so that it needs few normalisers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from raincheck_hf.kernels.powers import shared_exp2
from raincheck_hf.kernels.segments import block_table, split_width

_LOG2_E = 1.4426950408889634
_COPIED = 16  # bytes that a descriptor's address and strides are multiples of


@triton.jit
def _part(
    source, line, at, patches, pitch, COLUMN: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """[ROWS, PART] of one head, from COLUMN on; zero behind its last column and the last patch.

    Where a segment ends shows nowhere.
    """
    if WIDTH == 0:
        tile = tl.reshape(source.load([line, at, COLUMN]), (ROWS, PART))
    else:
        place = at + tl.arange(0, ROWS)
        part = COLUMN + tl.arange(0, PART)
        fits = (place < patches)[:, None] & (part < WIDTH)[None, :]
        row = source + place[:, None].to(tl.int64) * pitch + line * WIDTH
        tile = tl.load(row + part[None, :], mask=fits, other=0.0)
    return tile


@triton.jit
def _rows(
    heads, tails, line, at, patches, pitch, ROWS: tl.constexpr, HEAD: tl.constexpr,
    TAIL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head: the first HEAD columns, and the TAIL ones behind them."""
    head = _part(heads, line, at, patches, pitch, 0, ROWS, HEAD, WIDTH)
    tail = head
    if TAIL > 0:
        tail = _part(tails, line, at, patches, pitch, HEAD, ROWS, TAIL, WIDTH)
    return head, tail


@triton.jit
def _scores(q_head, q_tail, k_head, k_tail, TAIL: tl.constexpr, PRECISION: tl.constexpr):
    """q kᵀ fp32 [queries, keys]."""
    scores = tl.dot(q_head, tl.trans(k_head), input_precision=PRECISION)
    if TAIL > 0:
        scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision=PRECISION)
    return scores


@triton.jit
def _folded_keys(tile):
    """[queries, keys] as [queries, 8]: sums of every eighth key, which one thread holds."""
    queries: tl.constexpr = tile.shape[0]
    keys: tl.constexpr = tile.shape[1]
    return tl.sum(tl.reshape(tile, (queries, keys // 8, 8)), 1)


@triton.jit
def _folded_queries(tile, BANDS: tl.constexpr):
    """[queries, keys] as [BANDS, 8, keys]: sums of the queries that one thread holds.

    Warps take bands of 16 queries in turn, and a thread has every eighth one of a band.
    """
    queries: tl.constexpr = tile.shape[0]
    keys: tl.constexpr = tile.shape[1]
    tile = tl.reshape(tile, (queries // (16 * BANDS), BANDS, 2, 8, keys))
    return tl.sum(tl.sum(tile, 2), 0)


@triton.jit
def _more_total(most, total, scores, scale):
    """The running maximum [ROWS] and sum of powers [ROWS, 8], with a tile more; scale above 0."""
    high = tl.maximum(most, tl.max(scores, 1) * scale)
    more = _folded_keys(tl.exp2(scores * scale - high[:, None]))
    return high, total * tl.exp2(most - high)[:, None] + more


@triton.jit
def _normalisers(
    own_heads, own_tails, heads, tails, blocks, normaliser, patches, pitch, scale,
    HEAD: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """m_i in powers of 2 for ROWS queries of one head.

    Args:
        own_heads, own_tails: queries [N, H, e], rows ``pitch`` apart and heads one behind the
            other; where WIDTH is 0, descriptors of them as [H, N, e], ROWS at a time.
        heads, tails: keys likewise, OTHERS at a time.
        blocks: int32 [blocks, 3], where a block and its segment start, and where the segment ends.
        normaliser: fp32 [H, N], written.
        scale: fp32, above 0, of scores in powers of 2.
        WIDTH: e, or 0.
    """
    blocks += tl.program_id(0) * 3
    line = tl.program_id(1)
    first, start, stop = tl.load(blocks), tl.load(blocks + 1), tl.load(blocks + 2)
    q_head, q_tail = _rows(
        own_heads, own_tails, line, first, patches, pitch, ROWS, HEAD, TAIL, WIDTH
    )
    most = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, 8], tl.float32)
    whole = stop - (stop - start) % OTHERS
    for at in range(start, whole, OTHERS):
        k_head, k_tail = _rows(heads, tails, line, at, patches, pitch, OTHERS, HEAD, TAIL, WIDTH)
        scores = _scores(q_head, q_tail, k_head, k_tail, TAIL, PRECISION)
        most, total = _more_total(most, total, scores, scale)
    # One turn at most; behind an `if`, ptxas 12.8 may get it wrong (VISION.md).
    for at in tl.range(whole, stop, OTHERS, num_stages=1):
        k_head, k_tail = _rows(heads, tails, line, at, patches, pitch, OTHERS, HEAD, TAIL, WIDTH)
        scores = _scores(q_head, q_tail, k_head, k_tail, TAIL, PRECISION)
        fits = at + tl.arange(0, OTHERS) < stop
        scores = tl.where(fits[None, :], scores, -float("inf"))
        most, total = _more_total(most, total, scores, scale)
    place = first + tl.arange(0, ROWS)
    normaliser += line.to(tl.int64) * patches
    tl.store(normaliser + place, most + tl.log2(tl.sum(total, 1)), mask=place < stop)


@triton.jit
def _columns(
    own_heads, own_tails, heads, tails, blocks, normaliser, received, patches, pitch, scale,
    HEAD: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr, BANDS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """What ROWS keys of one head receive, a mean over queries; see `_normalisers`.

    Args:
        own_heads, own_tails: keys.
        heads, tails: queries.
        received: fp32 [H, N], written.
        BANDS: of 16 queries, that a tile's warps take at a time.
    """
    blocks += tl.program_id(0) * 3
    line = tl.program_id(1)
    first, start, stop = tl.load(blocks), tl.load(blocks + 1), tl.load(blocks + 2)
    normaliser += line.to(tl.int64) * patches
    received += line.to(tl.int64) * patches
    k_head, k_tail = _rows(
        own_heads, own_tails, line, first, patches, pitch, ROWS, HEAD, TAIL, WIDTH
    )
    shares = tl.zeros([BANDS, 8, ROWS], tl.float32)
    whole = stop - (stop - start) % OTHERS
    for at in range(start, whole, OTHERS):
        past = tl.load(normaliser + at + tl.arange(0, OTHERS))
        q_head, q_tail = _rows(heads, tails, line, at, patches, pitch, OTHERS, HEAD, TAIL, WIDTH)
        scores = _scores(q_head, q_tail, k_head, k_tail, TAIL, PRECISION)
        scores = scores * scale - past[:, None]
        powers = shared_exp2(scores) if SHARED else tl.exp2(scores)
        shares += _folded_queries(powers, BANDS)
    for at in tl.range(whole, stop, OTHERS, num_stages=1):  # as in `_normalisers`
        other = at + tl.arange(0, OTHERS)
        fits = other < stop
        past = tl.load(normaliser + other, mask=fits, other=0.0)
        q_head, q_tail = _rows(heads, tails, line, at, patches, pitch, OTHERS, HEAD, TAIL, WIDTH)
        scores = _scores(q_head, q_tail, k_head, k_tail, TAIL, PRECISION)
        scores = tl.where(fits[:, None], scores * scale - past[:, None], -float("inf"))
        shares += _folded_queries(tl.exp2(scores), BANDS)
    place = first + tl.arange(0, ROWS)
    total = tl.sum(tl.sum(shares, 0), 0)
    tl.store(received + place, total / (stop - start), mask=place < stop)


def _reaches(tensor: Tensor, major: int) -> bool:
    """Whether the GPU is of this compute capability or later; the interpreter is of any."""
    return not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device)[0] >= major


def _described(heads: Tensor) -> bool:
    """Whether [N, H, e] is to be copied by descriptor; fp32 is multiplied from registers."""
    if not _reaches(heads, 9):
        return False
    steps = (heads.data_ptr(), *(n * heads.element_size() for n in heads.stride()[:2]))
    return heads.element_size() == 2 and all(step % _COPIED == 0 for step in steps)


def _tiles(heads: Tensor, rows: int, parts: tuple[int, int], described: bool) -> list[object]:
    """[N, H, e] as a kernel takes it, in tiles of ``rows`` and either part of a head."""
    if not described:
        return [heads, heads]
    patches, count, width = heads.shape
    layout = ([count, patches, width], [heads.stride(1), heads.stride(0), 1])
    return [TensorDescriptor(heads, *layout, [1, rows, part or parts[0]]) for part in parts]


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
    parts = split_width(width)
    rows = rows or (128 if half else 64)
    others = others or (64 if half else 32)
    if query.stride()[1:] != (width, 1) or key.stride() != query.stride():
        query, key = query.contiguous(), key.contiguous()
    described = _described(query) and _described(key)
    tiles_of = partial(_tiles, parts=parts, described=described)
    blocks = block_table(lengths, rows, query.device)
    received = torch.empty(heads, patches, dtype=torch.float32, device=query.device)
    shapes = {
        "HEAD": parts[0],
        "TAIL": parts[1],
        "ROWS": rows,
        "OTHERS": others,
        "WIDTH": 0 if described else width,
        "PRECISION": "ieee",
    }
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    common = (patches, query.stride(0), scale * _LOG2_E)
    grid = (len(blocks), heads)
    with torch.cuda.device_of(query):
        if normaliser is None:
            normaliser = torch.empty_like(received)
            tiles = (*tiles_of(query, rows), *tiles_of(key, others))
            _normalisers[grid](*tiles, blocks, normaliser, *common, **shapes, **options)
        tiles = (*tiles_of(key, rows), *tiles_of(query, others))
        shapes |= {"BANDS": min(warps, others // 16), "SHARED": half and _reaches(query, 8)}
        _columns[grid](*tiles, blocks, normaliser, received, *common, **shapes, **options)
    return received.mean(0)
