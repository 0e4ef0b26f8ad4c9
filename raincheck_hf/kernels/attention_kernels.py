# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Attention by region: a pass over the keys shared by splits, then a merge. Twin: `attention`."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from raincheck_hf.kernels.attention_checks import check_descriptor, check_heads, launch_options
from raincheck_hf.kernels.attention_plan import AttentionPlan, plan_attention, scratch_size
from raincheck_hf.kernels.descriptor import (
    ANSWER,
    CHUNK,
    END,
    KEYS,
    PREFIX,
    STRIDE,
    TOKEN,
    VALUES,
)


@triton.jit
def _write(
    mixed, out, gate, row, head, present, used, out_row, gate_row, gate_head,
    DIM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Gate what V vectors attend to, fp32 [V, DIM], and write it; see `_merge`."""
    TYPE: tl.constexpr = out.dtype.element_ty
    d = tl.arange(0, DIM)
    if GATED:
        source = gate + row.to(tl.int64) * gate_row + head * gate_head
        opened = tl.load(source[:, None] + d[None, :], mask=used[:, None], other=0.0)
        opened = 1.0 / (1.0 + tl.exp(-opened.to(tl.float32)))
        mixed = mixed.to(TYPE).to(tl.float32) * opened.to(TYPE).to(tl.float32)
    target = out + row.to(tl.int64) * out_row + head * DIM
    tl.store(target[:, None] + d[None, :], mixed.to(TYPE), mask=present[:, None])


@triton.jit
def _merge(
    sums, tops, totals, out, gate, row, head, present, used, out_row, gate_row, gate_head,
    QUERY_HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, WIDE: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Add up what the splits found for V vectors, gate it, write it.

    Args:
        sums: fp32 [rows · QUERY_HEADS, SPLITS, DIM].
        tops: fp32 [rows · QUERY_HEADS, SPLITS], largest score; −inf where a split saw no key.
        totals: fp32 likewise, sums of weights.
        row: int32 [V].
        head: int32 [V].
        present: bool [V], which are written.
        used: bool [V], which are not zero.
        WIDE: a power of two, SPLITS or more.
    """
    split = tl.arange(0, WIDE)
    d = tl.arange(0, DIM)
    place = (row.to(tl.int64) * QUERY_HEADS + head)[:, None] * SPLITS + split[None, :]
    inside = used[:, None] & (split < SPLITS)[None, :]
    # Around the first-level cache, which does not see what other processors wrote meanwhile.
    top = tl.load(tops + place, mask=inside, other=-float("inf"), cache_modifier=".cg")
    total = tl.load(totals + place, mask=inside, other=0.0, cache_modifier=".cg")
    part = tl.load(
        sums + place[:, :, None] * DIM + d[None, None, :],
        mask=inside[:, :, None], other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    highest = tl.max(top, 1)
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    weight = tl.exp2(top - highest[:, None])
    # What a split that saw no key left in its place may be anything, NaN too.
    part = tl.where((weight > 0)[:, :, None], part * weight[:, :, None], 0.0)
    total = tl.sum(tl.where(weight > 0, total * weight, 0.0), 1)
    mixed = tl.sum(part, 1) / tl.where(total > 0, total, 1.0)[:, None]
    _write(mixed, out, gate, row, head, present, used, out_row, gate_row, gate_head, DIM, GATED)


@triton.jit
def _split(
    q, header, record, sums, tops, totals, out, gate, arrivals,
    rows, q_row, q_head, out_row, gate_row, gate_head, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr, VECTORS: tl.constexpr, BLOCK: tl.constexpr,
    LAST_MERGES: tl.constexpr, WIDE: tl.constexpr, AT_ONCE: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """One split's share of the keys of a key head, for a block of rows.

    Keys that no row of the block sees are left out: what the others see, up to the last chunk row,
    then the answer, is numbered through, and the numbers are shared out.

    Args:
        arrivals: int32 [row blocks · KV_HEADS], zero before and after.
        scale: of the scores, times log2(e): weights are powers of two.
        BLOCK: keys at a time.
        AT_ONCE: vectors that the last split merges at a time.
    """
    TYPE: tl.constexpr = q.dtype.element_ty
    QUERY_HEADS: tl.constexpr = KV_HEADS * GROUP
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    first_row = tl.program_id(2) * ROWS
    last_row = tl.minimum(first_row + ROWS, rows)  # one past
    capacity = rows - 1
    prefix = tl.load(header + PREFIX).to(tl.int32)
    chunk = tl.minimum(tl.load(header + CHUNK).to(tl.int32), capacity)
    answer = tl.load(header + ANSWER).to(tl.int32)
    end = tl.load(header + END).to(tl.int32)
    token = tl.load(header + TOKEN).to(tl.int32)
    stride = tl.multiple_of(tl.load(record + STRIDE), 16)
    keys = tl.multiple_of(tl.load(record + KEYS).to(tl.pointer_type(TYPE)), 16)
    values = tl.multiple_of(tl.load(record + VALUES).to(tl.pointer_type(TYPE)), 16)
    keys += kv_head * stride
    values += kv_head * stride

    lane = tl.arange(0, VECTORS)
    row = first_row + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    present = (lane < ROWS * GROUP) & (row < rows)
    decodes = present & (row == capacity) & (token > 0)
    in_chunk = present & (row < chunk)
    used = in_chunk | decodes
    sees_to = tl.where(in_chunk, prefix + row + 1, tl.where(decodes, prefix, 0))

    has_token = (last_row == rows) & (token > 0)
    ahead = tl.where(has_token, prefix, 0)
    ahead = tl.where(first_row < chunk, prefix + tl.minimum(last_row, chunk), ahead)
    count = ahead + tl.where(has_token, end - answer + 1, 0)
    blocks = tl.cdiv(count, BLOCK)
    first = split * blocks // SPLITS
    stop = (split + 1) * blocks // SPLITS

    d = tl.arange(0, DIM)
    source = q + row.to(tl.int64) * q_row + head * q_head
    query = tl.load(source[:, None] + d[None, :], mask=used[:, None], other=0.0)
    top = tl.full([VECTORS], -float("inf"), tl.float32)
    total = tl.zeros([VECTORS], tl.float32)
    mixed = tl.zeros([VECTORS, DIM], tl.float32)
    for block in range(first, stop):
        number = block * BLOCK + tl.arange(0, BLOCK)
        inside = number < count
        slot = tl.where(number < ahead, number, number - ahead + answer)
        at = slot[:, None].to(tl.int64) * DIM + d[None, :]
        key = tl.load(keys + at, mask=inside[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        in_answer = inside & (number >= ahead)
        seen = (number[None, :] < sees_to[:, None]) | (decodes[:, None] & in_answer[None, :])
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen no key yet: its weights become 2^-inf = 0, not NaN.
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 1)
        value = tl.load(values + at, mask=inside[:, None], other=0.0)
        mixed = tl.dot(weight.to(TYPE), value, mixed * shrink[:, None], input_precision="ieee")
        top = higher

    if SPLITS == 1:
        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
        _write(mixed, out, gate, row, head, present, used, out_row, gate_row, gate_head, DIM, GATED)
    else:
        place = (row.to(tl.int64) * QUERY_HEADS + head) * SPLITS + split
        tl.store(tops + place, top, mask=used)
        tl.store(totals + place, total, mask=used)
        worked = used & (first < stop)
        tl.store(sums + place[:, None] * DIM + d[None, :], mixed, mask=worked[:, None])

    if LAST_MERGES and SPLITS > 1:
        arrival = arrivals + tl.program_id(2) * KV_HEADS + kv_head
        tl.debug_barrier()  # the whole program's writes come before its arrival
        if tl.atomic_add(arrival, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrival, 0)
            for start in range(0, (last_row - first_row) * GROUP, AT_ONCE):
                near = start + tl.arange(0, AT_ONCE)
                r = first_row + near // GROUP
                valid = r < last_row
                live = valid & ((r < chunk) | ((r == capacity) & (token > 0)))
                _merge(
                    sums, tops, totals, out, gate, r, kv_head * GROUP + near % GROUP, valid, live,
                    out_row, gate_row, gate_head, QUERY_HEADS, DIM, SPLITS, WIDE, GATED,
                )  # fmt: skip


@triton.jit
def _merge_splits(
    header, sums, tops, totals, out, gate, rows, out_row, gate_row, gate_head,
    QUERY_HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, WIDE: tl.constexpr,
    VECTORS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Some vectors, in a launch of its own."""
    chunk = tl.load(header + CHUNK).to(tl.int32)
    token = tl.load(header + TOKEN).to(tl.int32)
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    row = vector // QUERY_HEADS
    decodes = (row == rows - 1) & (token > 0)
    present = row < rows
    used = present & (((row < chunk) & (row < rows - 1)) | decodes)
    _merge(
        sums, tops, totals, out, gate, row, vector % QUERY_HEADS, present, used,
        out_row, gate_row, gate_head, QUERY_HEADS, DIM, SPLITS, WIDE, GATED,
    )  # fmt: skip


def region_attention(
    q: Tensor,
    header: Tensor,
    record: Tensor,
    out: Tensor,
    scratch: Tensor,
    *,
    kv_heads: int,
    scale: float,
    gate: Tensor | None = None,
    arrivals: Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> None:
    """As `attention.region_attention`; lengths and addresses come from the device.

    The last row is the decode row. Given the last row of q, gate and out alone, the decode row is
    computed beside a chunk of any size that another kernel computes: it does not see the chunk.

    Args:
        q: [T, Hq, dim], inner stride 1, normalised and rotated.
        header: int64 [HEADER], see `descriptor`.
        record: int64 [RECORD_SIZE]: KEYS and VALUES are addresses of [H, slots, dim] in q's dtype,
            multiples of 16 bytes; STRIDE is slots · dim. This pass's rows are written already.
        out: [T, Hq · dim] in q's dtype, inner stride 1, written; zero in rows not in use.
        scratch: fp32, contiguous, `scratch_size(T, Hq, dim, plan.splits)` entries or more.
        kv_heads: H.
        scale: of the scores.
        gate: [T, Hq, dim], inner stride 1; its sigmoid multiplies the result. None: no gate.
        arrivals: int32, contiguous, H · plan.row_blocks(T, Hq / H) entries or more, zero; they are
            zero again afterwards. Needed where `plan.last_merges`.
        plan: sizes of the launches; None is `plan_attention`'s.

    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    rows, query_heads, dim = check_heads("q", q)
    check_descriptor(header, record)
    if kv_heads < 1 or query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads cannot share {kv_heads} key heads")
    if out.shape != (rows, query_heads * dim) or out.dtype != q.dtype or out.stride(1) != 1:
        raise ValueError(
            f"out must be {q.dtype} [{rows}, {query_heads * dim}] with inner stride 1, "
            f"got {out.dtype} {list(out.shape)} with strides {out.stride()}"
        )
    if gate is not None:
        check_heads("gate", gate, q.shape, q.dtype)
    group = query_heads // kv_heads
    plan = plan or plan_attention(rows, query_heads, kv_heads, dim, q.element_size())
    vectors = rows * query_heads * plan.splits
    size = scratch_size(rows, query_heads, dim, plan.splits)
    if scratch.dtype != torch.float32 or scratch.numel() < size or not scratch.is_contiguous():
        raise ValueError(f"scratch must be contiguous fp32 [{size}], got {list(scratch.shape)}")
    blocks = plan.row_blocks(rows, group)
    if plan.last_merges and (
        arrivals is None or arrivals.dtype != torch.int32 or arrivals.numel() < kv_heads * blocks
    ):
        raise ValueError(f"last_merges needs arrivals, int32 [{kv_heads * blocks}] of zeros")
    flat = scratch.view(-1)
    sums, tops, totals = flat, flat[vectors * dim :], flat[vectors * (dim + 1) :]
    wide = triton.next_power_of_2(plan.splits)
    gated = out if gate is None else gate
    gate_row, gate_head = (0, 0) if gate is None else (gate.stride(0), gate.stride(1))
    with torch.cuda.device_of(q):
        _split[(plan.splits, kv_heads, blocks)](
            q, header, record, sums, tops, totals, out, gated,
            arrivals if plan.last_merges else header,
            rows, q.stride(0), q.stride(1), out.stride(0), gate_row, gate_head,
            scale * math.log2(math.e),
            KV_HEADS=kv_heads, GROUP=group, DIM=dim, SPLITS=plan.splits,
            ROWS=plan.rows(group), VECTORS=plan.vectors, BLOCK=plan.keys,
            LAST_MERGES=plan.last_merges, WIDE=wide,
            AT_ONCE=max(1, min(plan.vectors, 2048 * plan.warps // (wide * dim))),
            GATED=gate is not None, **launch_options(q, plan.warps, plan.stages),
        )  # fmt: skip
        if plan.splits > 1 and not plan.last_merges:
            _merge_splits[(triton.cdiv(rows * query_heads, plan.merge_vectors),)](
                header, sums, tops, totals, out, gated,
                rows, out.stride(0), gate_row, gate_head,
                QUERY_HEADS=query_heads, DIM=dim, SPLITS=plan.splits, WIDE=wide,
                VECTORS=plan.merge_vectors, GATED=gate is not None,
                **launch_options(q, plan.merge_warps),
            )  # fmt: skip
