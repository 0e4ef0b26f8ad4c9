# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""The chunk, block of rows after block of rows, from the prefix checkpoint; then the join."""

from __future__ import annotations

import triton
import triton.language as tl

from raincheck_hf.kernels.descriptor import CHUNK, PREFIX_STATE_IN, PREFIX_STATE_OUT
from raincheck_hf.kernels.gdn_join import lead_tokens, repair_and_join
from raincheck_hf.kernels.gdn_parts import address, product, rounded
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
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some columns of one head, held in registers; grid (HV, V / WIDTH)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    DTYPE: tl.constexpr = out.dtype.element_ty
    GROUP: tl.constexpr = HV // HK
    head = tl.program_id(0)
    part = tl.program_id(1)
    near = tl.arange(0, ROWS)
    dim = tl.arange(0, K)
    column = part * WIDTH + tl.arange(0, WIDTH)
    chunk = tl.load(header + CHUNK).to(tl.int32)
    key_at = near[:, None] * (HK * K) + (head // GROUP) * K + dim[None, :]
    value_at = near[:, None] * (HV * V) + head * V + column[None, :]
    square = near[:, None] * ROWS + near[None, :]
    out_at = near[:, None] * out_pitch + head * V + column[None, :]
    if chunk > 0:
        tile_at = head * K * V + dim[:, None] * V + column[None, :]
        count, alpha, strength, lead_k, lead_v = lead_tokens(
            weight, bias, header, layer, head, column, HK, HV, K, V, W, TOKENS, BIAS
        )
        state = tl.load(address(layer, PREFIX_STATE_IN, tl.float32) + tile_at)
        for block in tl.range(0, tl.cdiv(chunk, ROWS), num_stages=STAGES):
            first = tl.cast(block, tl.int64) * ROWS
            place = tl.cast(block, tl.int64) * HV + head
            factor = factors + place * (FACTORS * ROWS) + near
            # Each matrix is read just before its product: all at once would not fit the registers.
            k = tl.load(keys + first * (HK * K) + key_at)
            v = tl.load(values + first * (HV * V) + value_at).to(tl.float32)
            read = tl.load(factor + READ * ROWS)
            beta = tl.load(factor + BETA * ROWS)
            missing = beta[:, None] * v - read[:, None] * product(k, state)
            inverse = tl.load(inverses + place * (ROWS * ROWS) + square)
            change = tl.dot(inverse, missing, input_precision="tf32x3")
            q = tl.load(queries + first * (HK * K) + key_at)
            answer = tl.load(factor + ASK * ROWS)[:, None] * product(q, state)
            score = tl.load(scores + place * (ROWS * ROWS) + square)
            answer += tl.dot(score, change, input_precision="tf32x3")
            write = tl.load(factor + WRITE * ROWS)
            state = tl.load(decays + place) * state
            state += product(tl.trans(k), write[:, None] * change)
            row = block * ROWS + near
            answer = tl.where((row < chunk)[:, None], rounded(answer, DTYPE), 0.0)
            tl.store(
                out + first * out_pitch + out_at,
                answer.to(DTYPE),
                mask=(row < capacity)[:, None] & (column >= 0)[None, :],
            )
        tl.store(address(layer, PREFIX_STATE_OUT, tl.float32) + tile_at, state)
        if count > 0:
            repair_and_join(
                state,
                count,
                alpha,
                strength,
                lead_k,
                lead_v,
                header,
                layer,
                head,
                part,
                HK,
                HV,
                K,
                V,
                W,
                WIDTH,
                TOKENS,
                DTYPE,
            )
    for block in range(tl.cdiv(chunk, ROWS), tl.cdiv(capacity, ROWS)):
        first = tl.cast(block, tl.int64) * ROWS
        tl.store(
            out + first * out_pitch + out_at,
            tl.zeros([ROWS, WIDTH], DTYPE),
            mask=(block * ROWS + near < capacity)[:, None] & (column >= 0)[None, :],
        )
