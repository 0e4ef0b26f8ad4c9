# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Norm, M-RoPE and the write to the conversation, in one launch. Twins: `rope`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from raincheck_hf.kernels.attention_checks import (
    TRITON_TYPES,
    check_descriptor,
    check_heads,
    launch_options,
)
from raincheck_hf.kernels.descriptor import (
    CHUNK,
    END,
    KEYS,
    POSITION,
    PREFIX,
    STRIDE,
    TOKEN,
    VALUES,
)
from raincheck_hf.kernels.launch import Repeated


@triton.jit
def _rope_table(
    positions, header, inv_freq, axis, cos, sin, rows, capacity, stride, scaling,
    HALF: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """A block of rows; the decode row's position comes from the header."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    near = tl.arange(0, WIDE)
    of = tl.load(axis + near, mask=near < HALF, other=0)
    frequency = tl.load(inv_freq + near, mask=near < HALF, other=0.0)
    inside = (row < rows)[:, None] & (near < HALF)[None, :]
    decodes = (row == capacity)[:, None]
    chunk = tl.load(
        positions + of[None, :] * stride + row[:, None], mask=inside & ~decodes, other=0
    )
    own = tl.load(header + POSITION + of, mask=near < HALF, other=0)
    angle = tl.where(decodes, own[None, :], chunk).to(tl.float32) * frequency[None, :]
    place = row[:, None] * HALF + near[None, :]
    tl.store(cos + place, (tl.cos(angle) * scaling).to(TYPE).to(tl.float32), mask=inside)
    tl.store(sin + place, (tl.sin(angle) * scaling).to(TYPE).to(tl.float32), mask=inside)


@triton.jit
def _scaled(x, weight, OFFSET: tl.constexpr, TYPE: tl.constexpr):
    """The norm's last step, rounded as the models do."""
    if OFFSET:
        x = x * (OFFSET + weight.to(tl.float32))[None, :]
    else:
        x = x.to(TYPE).to(tl.float32) * weight.to(tl.float32)[None, :]
    return x.to(TYPE).to(tl.float32)


@triton.jit
def _turned(
    source, target, row, live, stored, weight, cos, sin, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, OFFSET: tl.constexpr,
    WIDE: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate N vectors. The halves that turn into each other are read apart.

    Args:
        source: pointers [N] to vectors [DIM].
        target: pointers [N].
        row: int32 [N], of the table.
        live: bool [N], which are read; the others are zero.
        stored: bool [N], which are written.
    """
    TYPE: tl.constexpr = source.dtype.element_ty
    near = tl.arange(0, WIDE)
    turns = near < HALF
    read = live[:, None] & turns[None, :]
    first = tl.load(source[:, None] + near[None, :], mask=read, other=0.0).to(tl.float32)
    second = tl.load(source[:, None] + HALF + near[None, :], mask=read, other=0.0).to(tl.float32)
    first_weight = tl.load(weight + near, mask=turns, other=0.0)
    second_weight = tl.load(weight + HALF + near, mask=turns, other=0.0)
    at = row[:, None] * HALF + near[None, :]
    c = tl.load(cos + at, mask=read, other=0.0)
    s = tl.load(sin + at, mask=read, other=0.0)
    square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if 2 * HALF < DIM:
        far = 2 * HALF + tl.arange(0, REST)
        passes = far < DIM
        rest = tl.load(
            source[:, None] + far[None, :], mask=live[:, None] & passes[None, :], other=0.0
        ).to(tl.float32)
        rest_weight = tl.load(weight + far, mask=passes, other=0.0)
        square += tl.sum(rest * rest, 1)
        unit = tl.rsqrt(square / DIM + eps)[:, None]
        rest = _scaled(rest * unit, rest_weight, OFFSET, TYPE)
        tl.store(
            target[:, None] + far[None, :], rest.to(TYPE), mask=stored[:, None] & passes[None, :]
        )
    else:
        unit = tl.rsqrt(square / DIM + eps)[:, None]
    first = _scaled(first * unit, first_weight, OFFSET, TYPE)
    second = _scaled(second * unit, second_weight, OFFSET, TYPE)
    write = stored[:, None] & turns[None, :]
    turned = (first * c).to(TYPE).to(tl.float32) - (second * s).to(TYPE).to(tl.float32)
    tl.store(target[:, None] + near[None, :], turned.to(TYPE), mask=write)
    turned = (second * c).to(TYPE).to(tl.float32) + (first * s).to(TYPE).to(tl.float32)
    tl.store(target[:, None] + HALF + near[None, :], turned.to(TYPE), mask=write)


@triton.jit
def _rotate_and_write(
    q, k, v, q_weight, k_weight, cos, sin, header, record, q_out,
    rows, capacity, q_row, q_head, k_row, k_head, v_row, v_head, out_row, eps,
    QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    OFFSET: tl.constexpr, WIDE: tl.constexpr, REST: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Some rows and heads of q, or of k, or of v: the grid's second axis lists them in turn."""
    Q_BLOCKS: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    TYPE: tl.constexpr = q.dtype.element_ty
    part = tl.program_id(1)
    lane = tl.arange(0, ROWS * HEADS)
    row = tl.program_id(0) * ROWS + lane // HEADS
    prefix = tl.load(header + PREFIX)
    chunk = tl.minimum(tl.load(header + CHUNK), capacity)
    end = tl.load(header + END)
    token = tl.load(header + TOKEN)
    stride = tl.multiple_of(tl.load(record + STRIDE), 16)
    keys = tl.multiple_of(tl.load(record + KEYS).to(tl.pointer_type(TYPE)), 16)
    values = tl.multiple_of(tl.load(record + VALUES).to(tl.pointer_type(TYPE)), 16)
    decodes = (row == capacity) & (token > 0)
    used = (row < rows) & ((row < chunk) | decodes)
    slot = tl.where(decodes, end, prefix + row)
    if part < Q_BLOCKS:
        head = part * HEADS + lane % HEADS
        inside = head < QUERY_HEADS
        _turned(
            q + row.to(tl.int64) * q_row + head * q_head,
            q_out + row.to(tl.int64) * out_row + head * DIM,
            row, used & inside, (row < rows) & inside, q_weight, cos, sin, eps,
            DIM, HALF, OFFSET, WIDE, REST,
        )  # fmt: skip
    elif part < Q_BLOCKS + KV_BLOCKS:
        head = (part - Q_BLOCKS) * HEADS + lane % HEADS
        live = used & (head < KV_HEADS)
        _turned(
            k + row.to(tl.int64) * k_row + head * k_head,
            keys + head * stride + slot * DIM,
            row, live, live, k_weight, cos, sin, eps,
            DIM, HALF, OFFSET, WIDE, REST,
        )  # fmt: skip
    else:
        head = (part - Q_BLOCKS - KV_BLOCKS) * HEADS + lane % HEADS
        live = used & (head < KV_HEADS)
        d = tl.arange(0, DIM)[None, :]
        source = v + row.to(tl.int64) * v_row + head * v_head
        target = values + head * stride + slot * DIM
        copied = tl.load(source[:, None] + d, mask=live[:, None])
        tl.store(target[:, None] + d, copied, mask=live[:, None])


def rope_table(
    positions: Tensor | None,
    header: Tensor,
    inv_freq: Tensor,
    axis: Tensor,
    scaling: float,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    *,
    capacity: int | None = None,
    block_rows: int = 8,
    warps: int = 4,
) -> None:
    """As `rope.rope_table`, once a pass: chunk rows from `positions`, the decode row's from header.

    Args:
        positions: int64 [3, at least the chunk rows], inner stride 1; None where there are none.
        header: int64 [HEADER], see `descriptor`.
        inv_freq: fp32 [R], contiguous.
        axis: int32 [R], contiguous.
        scaling: the attention scaling.
        cos: fp32 [T, R], contiguous, written.
        sin: fp32 [T, R], contiguous, written.
        dtype: of the model: the values are rounded to it, and kept in fp32.
        capacity: index of the decode row; None is T − 1. T or more: there is none.
        block_rows: rows of a program, a power of two.
        warps: of a program.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    rows, half = cos.shape
    capacity = rows - 1 if capacity is None else capacity
    check_descriptor(header, None)
    for table in (cos, sin):
        if table.dtype != torch.float32 or table.shape != cos.shape or not table.is_contiguous():
            raise ValueError("cos and sin must be contiguous fp32 [T, R]")
    if inv_freq.dtype != torch.float32 or axis.dtype != torch.int32 or dtype not in TRITON_TYPES:
        raise ValueError(
            f"need fp32 inv_freq, int32 axis and a dtype of {list(TRITON_TYPES)}; "
            f"got {inv_freq.dtype}, {axis.dtype}, {dtype}"
        )
    if inv_freq.shape != (half,) or axis.shape != (half,):
        raise ValueError(f"inv_freq and axis must be [{half}] as cos is {list(cos.shape)}")
    if positions is None:
        if rows > 1 or capacity:
            raise ValueError("positions may be None only for a decode row alone")
        positions, stride = header, 0  # not read
    else:
        chunk = min(rows, capacity)
        fits = positions.dtype == torch.int64 and positions.ndim == 2 and len(positions) == 3
        if not fits or positions.shape[1] < chunk or (chunk > 1 and positions.stride(1) != 1):
            raise ValueError(f"positions must be int64 [3, {chunk} or more] with inner stride 1")
        stride = positions.stride(0)
    with torch.cuda.device_of(cos):
        _rope_table[(triton.cdiv(rows, block_rows),)](
            positions, header, inv_freq, axis, cos, sin, rows, capacity, stride, scaling,
            HALF=half, WIDE=triton.next_power_of_2(half), ROWS=block_rows,
            TYPE=TRITON_TYPES[dtype], **launch_options(cos, warps),
        )  # fmt: skip


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    header: Tensor,
    record: Tensor,
    q_out: Tensor,
    *,
    offset: int,
    eps: float,
    capacity: int | None = None,
    block_rows: int | None = None,
    block_heads: int | None = None,
    warps: int | None = None,
) -> None:
    """As `rope.rotate_and_write`, in one launch; lengths and addresses come from the device.

    Args:
        q: [T, Hq, dim], any strides but 1 within a vector (as cut from a projection's output).
        k: [T, H, dim], likewise.
        v: [T, H, dim], likewise.
        q_weight: [dim], contiguous, of the norm.
        k_weight: [dim].
        cos: fp32 [T, R], contiguous, from `rope_table`.
        sin: fp32 [T, R].
        header: int64 [HEADER], see `descriptor`.
        record: int64 [RECORD_SIZE]: KEYS and VALUES are addresses of [H, slots, dim] in q's dtype,
            multiples of 16 bytes; STRIDE is slots · dim.
        q_out: [T, Hq, dim], heads and vectors contiguous, written; zero in rows not in use.
        offset: 0 where the norm multiplies by w, 1 where by 1 + w.
        eps: of the norm.
        capacity: index of the decode row; None is T − 1. T or more: there is none, and all rows
            belong to the chunk (a prefill).
        block_rows: rows of a program, a power of two.
        block_heads: heads of a program, a power of two.
        warps: of a program.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    repeated_rotate_and_write(
        q, k, v, cos, sin, header, q_out, offset=offset, eps=eps, capacity=capacity,
        block_rows=block_rows, block_heads=block_heads, warps=warps,
    )(q_weight, k_weight, record)  # fmt: skip


def repeated_rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    header: Tensor,
    q_out: Tensor,
    *,
    offset: int,
    eps: float,
    capacity: int | None = None,
    block_rows: int | None = None,
    block_heads: int | None = None,
    warps: int | None = None,
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """`rotate_and_write` for layers that share their buffers: checked and looked up once.

    Arguments and errors as there. Returns what launches for one layer, given q_weight, k_weight
    and record.
    """
    rows, query_heads, dim = check_heads("q", q)
    kv_heads = k.shape[1] if k.ndim == 3 else 0
    for name, part in (("k", k), ("v", v)):
        check_heads(name, part, (rows, kv_heads, dim), q.dtype)
    check_heads("q_out", q_out, q.shape, q.dtype)
    check_descriptor(header, None)
    half = cos.shape[-1]
    if q_out.stride(1) != dim:
        raise ValueError(f"q_out's heads must be contiguous, got strides {q_out.stride()}")
    if offset not in (0, 1):
        raise ValueError(f"offset must be 0 or 1, got {offset}")
    for table in (cos, sin):
        fits = table.dtype == torch.float32 and table.is_contiguous()
        if not fits or table.shape != (rows, half) or not 0 < 2 * half <= dim:
            raise ValueError(f"cos and sin must be contiguous fp32 [{rows}, R], 2R at most {dim}")
    block_rows = block_rows or 1
    block_heads = block_heads or (1 if rows == 1 else 4 if rows <= 128 else 8)
    warps = warps or max(1, min(4, block_rows * block_heads * dim // 512))
    parts = triton.cdiv(query_heads, block_heads) + 2 * triton.cdiv(kv_heads, block_heads)
    launch = Repeated(
        _rotate_and_write,
        (triton.cdiv(rows, block_rows), parts),
        {
            "QUERY_HEADS": query_heads, "KV_HEADS": kv_heads, "DIM": dim, "HALF": half,
            "OFFSET": offset, "WIDE": triton.next_power_of_2(half),
            "REST": triton.next_power_of_2(max(1, dim - 2 * half)),
            "ROWS": block_rows, "HEADS": block_heads, **launch_options(q, warps),
        },
    )  # fmt: skip
    sizes = (
        rows, rows - 1 if capacity is None else capacity,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        q_out.stride(0), eps,
    )  # fmt: skip

    def run(q_weight: Tensor, k_weight: Tensor, record: Tensor) -> None:
        check_descriptor(None, record)
        if q_weight.shape != (dim,) or k_weight.shape != (dim,):
            raise ValueError(f"norm weights must be [{dim}]")
        with torch.cuda.device_of(q):
            launch(q, k, v, q_weight, k_weight, cos, sin, header, record, q_out, *sizes)

    return run
