# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""What a chunk's scan needs and no state enters: keys, values, decays, inverses and scores."""

from __future__ import annotations

import triton
import triton.language as tl

from raincheck_hf.kernels.descriptor import CHUNK, PREFIX_HISTORY_IN, PREFIX_HISTORY_OUT
from raincheck_hf.kernels.gdn_parts import (
    activated,
    address,
    exact_product,
    gates,
    inverse_norm,
    unit_lower_inverse,
)
from raincheck_hf.kernels.gdn_step import decode_row

# Factors of a row, in this order: what multiplies k S, q S, v, and the write to the state.
READ = tl.constexpr(0)
ASK = tl.constexpr(1)
BETA = tl.constexpr(2)
WRITE = tl.constexpr(3)
FACTORS = tl.constexpr(4)


@triton.jit
def _convolved_rows(
    mixed,
    pitch,
    history,
    weight,
    bias,
    first,
    chunk,
    channel,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    W: tl.constexpr,
):
    """SiLU of the convolution [ROWS, N] at rows first, ...; zero from row ``chunk`` on."""
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    row = first + tl.arange(0, ROWS)
    used = (row < chunk)[:, None]
    total = tl.zeros([ROWS, channel.shape[0]], tl.float32)
    start = mixed + first.to(tl.int64) * pitch
    for tap in tl.static_range(W):
        back = W - 1 - tap
        near = tl.arange(0, ROWS)[:, None] - back
        x = tl.load(
            start + near * pitch + channel[None, :], mask=used & (row[:, None] >= back), other=0.0
        )
        scale = tl.load(weight + channel * W + tap).to(tl.float32)
        total += x.to(tl.float32) * scale[None, :]
    if first == 0:
        # Row by row: a gather of the whole tile would take many registers for these few rows.
        for early in tl.static_range(W - 1):
            past = tl.zeros_like(channel).to(tl.float32)
            for place in tl.static_range(W - 1 - early):
                old = tl.load(history + channel * (W - 1) + early + place).to(tl.float32)
                past += old * tl.load(weight + channel * W + place).to(tl.float32)
            total += tl.where(row[:, None] == early, past[None, :], 0.0)
    if BIAS:
        total += tl.load(bias + channel).to(tl.float32)[None, :]
    return tl.where(used, activated(total, DTYPE), 0.0)


@triton.jit
def _decayed(sums, ROWS: tl.constexpr):
    """exp(G_i - G_j) [ROWS, ROWS] on and below the diagonal, else 0."""
    near = tl.arange(0, ROWS)
    below = near[:, None] >= near[None, :]
    apart = tl.where(below, sums[:, None] - sums[None, :], 0.0).to(tl.float32)
    return tl.where(below, tl.exp(apart), 0.0)


@triton.jit
def _move_history(mixed, pitch, layer, chunk, channel, W: tl.constexpr):
    """The last W - 1 inputs at the end of the chunk."""
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    past = address(layer, PREFIX_HISTORY_IN, DTYPE) + channel * (W - 1)
    new = address(layer, PREFIX_HISTORY_OUT, DTYPE) + channel * (W - 1)
    for tap in tl.static_range(W - 1):
        row = chunk + tap - (W - 1)
        if row >= 0:
            x = tl.load(mixed + row.to(tl.int64) * pitch + channel)
        else:
            x = tl.load(past + row + (W - 1))
        tl.store(new + tap, x)


@triton.jit(do_not_specialize=["capacity", "units"])
def prepare_kernel(
    mixed,
    mixed_pitch,
    a,
    a_pitch,
    b,
    b_pitch,
    out,
    out_pitch,
    weight,
    bias,
    log_rate,
    time_bias,
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
    units,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Two programs a row block and value head, and behind these ``units`` those of the decode row.

    Of the two, the first inverts the block's system, the second does all else; a block alone is
    over sooner this way.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    GROUP: tl.constexpr = HV // HK
    unit = tl.program_id(0)
    if unit >= units:
        unit -= units
        row = tl.cast(capacity, tl.int64)
        decode_row(
            mixed + row * mixed_pitch,
            a + row * a_pitch,
            b + row * b_pitch,
            out + row * out_pitch,
            weight,
            bias,
            log_rate,
            time_bias,
            header,
            layer,
            unit % HV,
            unit // HV,
            HK,
            HV,
            K,
            V,
            W,
            WIDTH,
            BIAS,
        )
    else:
        chunk = tl.load(header + CHUNK).to(tl.int32)
        block = unit // (2 * HV)
        head = unit % HV
        first = block * ROWS
        if first < chunk:
            near = tl.arange(0, ROWS)
            dim = tl.arange(0, K)
            row = first + near
            used = row < chunk
            far = row.to(tl.int64)
            g, beta = gates(
                tl.load(a + far * a_pitch + head, mask=used, other=0.0),
                tl.load(b + far * b_pitch + head, mask=used, other=0.0),
                tl.load(log_rate + head),
                tl.load(time_bias + head),
                DTYPE,
            )
            # Differences of long sums: fp64, so that a strong decay does not blur the next rows.
            g = tl.where(used, g, 0.0).to(tl.float64)
            beta = tl.where(used, beta, 0.0)
            sums = tl.cumsum(g, 0)
            history = address(layer, PREFIX_HISTORY_IN, DTYPE)
            q_at = (head // GROUP) * K + dim
            k_at = HK * K + q_at
            k = _convolved_rows(
                mixed, mixed_pitch, history, weight, bias, first, chunk, k_at, ROWS, BIAS, W
            )
            k_scale = inverse_norm(k, 1)
            k = k.to(DTYPE)
            square = near[:, None] * ROWS + near[None, :]
            place = (block.to(tl.int64) * HV + head) * ROWS * ROWS
            stored = far[:, None] * (HK * K) + q_at[None, :]
            if (unit // HV) % 2 == 0:
                system = exact_product(k, tl.trans(k)) * _decayed(sums, ROWS)
                system *= (beta * k_scale)[:, None] * k_scale[None, :]
                system = tl.where(near[:, None] > near[None, :], system, 0.0)
                tl.store(inverses + place + square, unit_lower_inverse(system, ROWS))
                if head % GROUP == 0:
                    tl.store(keys + stored, k)
            else:
                q = _convolved_rows(
                    mixed, mixed_pitch, history, weight, bias, first, chunk, q_at, ROWS, BIAS, W
                )
                q_scale = inverse_norm(q, 1) * (K**-0.5)
                q = q.to(DTYPE)
                score = exact_product(q, tl.trans(k)) * _decayed(sums, ROWS)
                score *= q_scale[:, None] * k_scale[None, :]
                tl.store(scores + place + square, score)
                if head % GROUP == 0:
                    tl.store(queries + stored, q)

                v_at = 2 * HK * K + head * V + tl.arange(0, V)
                v = _convolved_rows(
                    mixed, mixed_pitch, history, weight, bias, first, chunk, v_at, ROWS, BIAS, W
                )
                v_to = head * V + tl.arange(0, V)
                tl.store(values + far[:, None] * (HV * V) + v_to[None, :], v.to(DTYPE))

                whole = tl.sum(g, 0)
                grown = tl.exp(sums.to(tl.float32))
                rest = tl.exp((whole - sums).to(tl.float32))
                factor = factors + (block.to(tl.int64) * HV + head) * (FACTORS * ROWS) + near
                tl.store(factor + READ * ROWS, beta * k_scale * grown)
                tl.store(factor + ASK * ROWS, q_scale * grown)
                tl.store(factor + BETA * ROWS, beta)
                tl.store(factor + WRITE * ROWS, k_scale * rest)
                tl.store(decays + block * HV + head, tl.exp(whole.to(tl.float32)))
                if block == 0:
                    _move_history(mixed, mixed_pitch, layer, chunk, v_at, W)
                    if head % GROUP == 0:
                        _move_history(mixed, mixed_pitch, layer, chunk, q_at, W)
                        _move_history(mixed, mixed_pitch, layer, chunk, k_at, W)
