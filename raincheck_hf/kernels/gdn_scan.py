# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""The chunk, block of rows after block of rows, from the prefix checkpoint; then the join."""

from __future__ import annotations

import triton
import triton.language as tl

from raincheck_hf.kernels.descriptor import CHUNK, PREFIX_STATE_IN, PREFIX_STATE_OUT
from raincheck_hf.kernels.gdn_join import (
    join_tiles,
    lead_sources,
    lead_tokens,
    repair_and_join,
)
from raincheck_hf.kernels.gdn_parts import address, product, rounded, wide_product
from raincheck_hf.kernels.gdn_prepare import ASK, BETA, FACTORS, READ, WRITE


@triton.jit(do_not_specialize=["capacity"])
def scan_kernel(
    out,
    out_pitch,
    weight,
    bias,
    header,
    layer,
    queries,
    keys,
    values,
    inverses,
    scores,
    factors,
    decays,
    capacity,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    EARLY: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some columns of one head, held in registers; grid (HV, V / WIDTH)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    DTYPE: tl.constexpr = out.dtype.element_ty
    GROUP: tl.constexpr = HV // HK
    head = tl.program_id(0)
    part = tl.program_id(1)
    near = tl.arange(0, ROWS)
    dim = tl.arange(0, K)
    column = part * WIDTH + tl.arange(0, WIDTH)
    chunk = tl.load(header + CHUNK).to(tl.int32)
    old = address(layer, PREFIX_STATE_IN, tl.float32)
    new = address(layer, PREFIX_STATE_OUT, tl.float32)
    key_at = near[:, None] * (HK * K) + (head // GROUP) * K + dim[None, :]
    value_at = near[:, None] * (HV * V) + head * V + column[None, :]
    square = near[:, None] * ROWS + near[None, :]
    out_at = near[:, None] * out_pitch + head * V + column[None, :]
    tile_at = head * K * V + dim[:, None] * V + column[None, :]
    state = tl.load(old + tile_at, mask=(dim >= 0)[:, None] & (chunk > 0), other=0.0)
    if PDL:
        # No launch of this pass writes what was read so far.
        tl.extra.cuda.gdc_wait()
    if chunk > 0:
        if EARLY:
            sources = lead_sources(header, layer, W, DTYPE)
            tokens = lead_tokens(
                weight, bias, sources, head, part, HK, HV, K, V, W, TAPS, WIDTH, BIAS
            )
        once = tl.minimum(chunk, 1)
        for block in tl.range(0, tl.cdiv(chunk, ROWS), num_stages=STAGES):
            first = tl.cast(block, tl.int64) * ROWS
            place = tl.cast(block, tl.int64) * HV + head
            factor = factors + place * (FACTORS * ROWS) + near
            k = tl.load(keys + first * (HK * K) + key_at)
            v = tl.load(values + first * (HV * V) + value_at).to(tl.float32)
            read = tl.load(factor + READ * ROWS)
            beta = tl.load(factor + BETA * ROWS)
            inverse = tl.load(inverses + place * (ROWS * ROWS) + square)
            q = tl.load(queries + first * (HK * K) + key_at)
            ask = tl.load(factor + ASK * ROWS)
            score = tl.load(scores + place * (ROWS * ROWS) + square)
            write = tl.load(factor + WRITE * ROWS)
            decay = tl.load(decays + place)
            missing = beta[:, None] * v - read[:, None] * product(k, state, once)
            change = wide_product(inverse, missing, once)
            answer = ask[:, None] * product(q, state, once) + wide_product(score, change, once)
            state = decay * state + product(tl.trans(k), write[:, None] * change, 1)
            row = block * ROWS + near
            answer = tl.where((row < chunk)[:, None], rounded(answer, DTYPE), 0.0)
            tl.store(
                out + first * out_pitch + out_at,
                answer.to(DTYPE),
                mask=(row < capacity)[:, None] & (column >= 0)[None, :],
            )
        tl.store(new + tile_at, state)
        # Read again, rather than kept in registers through all blocks.
        sources = lead_sources(header, layer, W, DTYPE)
        tiles = join_tiles(sources, head, part, HK, HV, K, V, W, TAPS, WIDTH)
        if not EARLY:
            tokens = lead_tokens(
                weight, bias, sources, head, part, HK, HV, K, V, W, TAPS, WIDTH, BIAS
            )
        repair_and_join(
            state, tokens, tiles, sources, head, part, HK, HV, K, V, W, TAPS, WIDTH, HEIGHT
        )
    for block in range(tl.cdiv(chunk, ROWS), tl.cdiv(capacity, ROWS)):
        first = tl.cast(block, tl.int64) * ROWS
        tl.store(
            out + first * out_pitch + out_at,
            tl.zeros([ROWS, WIDTH], DTYPE),
            mask=(block * ROWS + near < capacity)[:, None] & (column >= 0)[None, :],
        )
