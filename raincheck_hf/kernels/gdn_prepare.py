# mypy: disable-error-code="no-untyped-def,assignment"
# An annotation in a jitted function speaks to Triton; a tuple grows while a loop is unrolled.
"""What a chunk's scan needs and no state enters: keys, values, decays, inverses and scores."""

from __future__ import annotations

import triton
import triton.language as tl

from raincheck_hf.kernels.descriptor import (
    CHUNK,
    LEAD,
    LEAD_STATE_IN,
    LIVE_STATE_IN,
    MAPPED,
    PHI_IN,
    PREFIX_HISTORY_IN,
    PREFIX_HISTORY_OUT,
    PREFIX_STATE_IN,
    RECORD,
    TOKEN,
)
from raincheck_hf.kernels.gdn_parts import (
    activated,
    address,
    channel_weights,
    exact_product,
    gates,
    inverse_norm,
    prefetch,
    unit_lower_inverse,
    weight_at,
)
from raincheck_hf.kernels.gdn_step import decode_row

# Factors of a row, in this order: what multiplies k S, q S, v, and the write to the state.
READ = tl.constexpr(0)
ASK = tl.constexpr(1)
BETA = tl.constexpr(2)
WRITE = tl.constexpr(3)
FACTORS = tl.constexpr(4)

# What the programs of a row block and value head do.
SYSTEM = tl.constexpr(0)
SCORES = tl.constexpr(1)
VALUES = tl.constexpr(2)
KINDS = tl.constexpr(3)


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
    TAPS: tl.constexpr,
):
    """SiLU of the convolution [ROWS, N] at rows first, ...; zero from row ``chunk`` on."""
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    row = first + tl.arange(0, ROWS)
    used = (row < chunk)[:, None]
    start = mixed + first.to(tl.int64) * pitch
    kept = channel_weights(weight, channel, W)
    # All that is read comes before the first sum, so that nothing waits for memory twice.
    inputs, past = (), ()
    for tap in tl.static_range(W):
        back = W - 1 - tap
        near = tl.arange(0, ROWS)[:, None] - back
        x = tl.load(
            start + near * pitch + channel[None, :], mask=used & (row[:, None] >= back), other=0.0
        )
        inputs = inputs + (x,)
    # Sums of a small matrix: each thread has a channel or two, instead of all that its part of the
    # tile would need, which are many loads far apart.
    place = tl.arange(0, TAPS)[None, :]
    at = channel[:, None]
    opening = (at >= 0) & (first == 0)
    taps = weight.to(tl.pointer_type(DTYPE)) + at * W + place
    scale = tl.load(taps, mask=opening & (place < W), other=0.0)
    for early in tl.static_range(W - 1):
        old = history + at * (W - 1) + early + place
        past = past + (tl.load(old, mask=opening & (early + place < W - 1), other=0.0),)
    total = tl.zeros([ROWS, channel.shape[0]], tl.float32)
    for tap in tl.static_range(W):
        total += inputs[tap].to(tl.float32) * weight_at(kept, tap, DTYPE)[None, :]
    if first == 0:
        for early in tl.static_range(W - 1):
            before = tl.sum(past[early].to(tl.float32) * scale.to(tl.float32), 1)
            total += tl.where(row[:, None] == early, before[None, :], 0.0)
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


@triton.jit
def _ask_for_states(header, layer, head, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr):
    """Have the states that the scan will read, and no program here does, in the L2 cache."""
    token = tl.load(header + TOKEN) > 0
    record = token & (tl.load(header + RECORD) > 0)
    extends = record & (tl.load(header + LEAD) == W - 1)
    mapped = tl.load(header + MAPPED) > 0
    line = head * K * V + 32 * tl.arange(0, K * V // 32)
    prefetch(address(layer, PREFIX_STATE_IN, tl.float32) + line)
    if (record | (token == 0)) & (extends | mapped):
        prefetch(address(layer, LEAD_STATE_IN, tl.float32) + line)
        if token == 0:
            prefetch(address(layer, LIVE_STATE_IN, tl.float32) + line)
        if extends == 0:
            map_line = head * K * K + 32 * tl.arange(0, K * K // 32)
            prefetch(address(layer, PHI_IN, tl.float32) + map_line)


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
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    AHEAD: tl.constexpr,
    LEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Three programs a row block and value head; behind these ``units`` those of the decode row.

    Of the three, one inverts the block's system, one scores its queries, one convolves its values;
    a block alone is over sooner this way.
    """
    if LEADS:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        tl.extra.cuda.gdc_wait()
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    GROUP: tl.constexpr = HV // HK
    unit = tl.program_id(0)
    if unit >= units:
        unit -= units
        last = tl.cast(capacity, tl.int64)
        decode_row(
            mixed + last * mixed_pitch,
            a + last * a_pitch,
            b + last * b_pitch,
            out + last * out_pitch,
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
        history = address(layer, PREFIX_HISTORY_IN, DTYPE)
        block = unit // (KINDS * HV)
        kind = (unit // HV) % KINDS
        head = unit % HV
        first = block * ROWS
        dim = tl.arange(0, K)
        q_at = (head // GROUP) * K + dim
        k_at = HK * K + q_at
        v_to = head * V + tl.arange(0, V)
        v_at = 2 * HK * K + v_to
        near = tl.arange(0, ROWS)
        row = first + near
        far = row.to(tl.int64)
        if first < chunk:
            if kind == VALUES:
                if AHEAD & (block == 0):
                    _ask_for_states(header, layer, head, K, V, W)
                v = _convolved_rows(
                    mixed,
                    mixed_pitch,
                    history,
                    weight,
                    bias,
                    first,
                    chunk,
                    v_at,
                    ROWS,
                    BIAS,
                    W,
                    TAPS,
                )
                tl.store(values + far[:, None] * (HV * V) + v_to[None, :], v.to(DTYPE))
                if block == 0:
                    _move_history(mixed, mixed_pitch, layer, chunk, v_at, W)
                    if head % GROUP == 0:
                        _move_history(mixed, mixed_pitch, layer, chunk, q_at, W)
                        _move_history(mixed, mixed_pitch, layer, chunk, k_at, W)
            else:
                used = row < chunk
                a_in = tl.load(a + far * a_pitch + head, mask=used, other=0.0)
                b_in = tl.load(b + far * b_pitch + head, mask=used, other=0.0)
                k = _convolved_rows(
                    mixed,
                    mixed_pitch,
                    history,
                    weight,
                    bias,
                    first,
                    chunk,
                    k_at,
                    ROWS,
                    BIAS,
                    W,
                    TAPS,
                )
                g, beta = gates(
                    a_in, b_in, tl.load(log_rate + head), tl.load(time_bias + head), DTYPE
                )
                # Differences of long sums: fp64, so that a strong decay does not blur later rows.
                g = tl.where(used, g, 0.0).to(tl.float64)
                beta = tl.where(used, beta, 0.0)
                sums = tl.cumsum(g, 0)
                grown = tl.exp(sums.to(tl.float32))
                decayed = _decayed(sums, ROWS)
                k_scale = inverse_norm(k, 1)
                k = k.to(DTYPE)
                square = near[:, None] * ROWS + near[None, :]
                place = block.to(tl.int64) * HV + head
                factor = factors + place * (FACTORS * ROWS) + near
                stored = far[:, None] * (HK * K) + q_at[None, :]
                if kind == SYSTEM:
                    system = exact_product(k, tl.trans(k)) * decayed
                    system *= (beta * k_scale)[:, None] * k_scale[None, :]
                    system = tl.where(near[:, None] > near[None, :], system, 0.0)
                    inverse = unit_lower_inverse(system, ROWS)
                    tl.store(inverses + place * ROWS * ROWS + square, inverse)
                    if head % GROUP == 0:
                        tl.store(keys + stored, k)
                    whole = tl.sum(g, 0)
                    rest = tl.exp((whole - sums).to(tl.float32))
                    tl.store(factor + READ * ROWS, beta * k_scale * grown)
                    tl.store(factor + BETA * ROWS, beta)
                    tl.store(factor + WRITE * ROWS, k_scale * rest)
                    tl.store(decays + place, tl.exp(whole.to(tl.float32)))
                else:
                    q = _convolved_rows(
                        mixed,
                        mixed_pitch,
                        history,
                        weight,
                        bias,
                        first,
                        chunk,
                        q_at,
                        ROWS,
                        BIAS,
                        W,
                        TAPS,
                    )
                    q_scale = inverse_norm(q, 1) * (K**-0.5)
                    q = q.to(DTYPE)
                    score = exact_product(q, tl.trans(k)) * decayed
                    score *= q_scale[:, None] * k_scale[None, :]
                    tl.store(scores + place * ROWS * ROWS + square, score)
                    if head % GROUP == 0:
                        tl.store(queries + stored, q)
                    tl.store(factor + ASK * ROWS, q_scale * grown)
