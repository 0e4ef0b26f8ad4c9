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
    inverse_length,
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
    near = tl.arange(0, ROWS)[:, None] * pitch + channel[None, :]
    start = mixed + first.to(tl.int64) * pitch
    kept = channel_weights(weight, channel, W)
    total = tl.zeros([ROWS, channel.shape[0]], tl.float32)
    for tap in tl.static_range(W):
        back = W - 1 - tap
        x = tl.load(start - back * pitch + near, mask=used & (row[:, None] >= back), other=0.0)
        total += x.to(tl.float32) * weight_at(kept, tap, DTYPE)[None, :]
    # Sums of a small matrix: each thread has a channel or two, instead of all that its part of the
    # tile would need, which are many loads far apart. All rows after the first find their lines
    # near, so that a loop costs no more waiting.
    place = tl.arange(0, TAPS)[None, :]
    at = channel[:, None]
    opening = (at >= 0) & (first == 0)
    taps = weight.to(tl.pointer_type(DTYPE)) + at * W + place
    scale = tl.load(taps, mask=opening & (place < W), other=0.0).to(tl.float32)
    old = history + at * (W - 1) + place
    for early in tl.range(0, tl.where(first == 0, W - 1, 0), num_stages=1):
        past = tl.load(old + early, mask=opening & (early + place < W - 1), other=0.0)
        before = tl.sum(past.to(tl.float32) * scale, 1)
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
def _moved_history(mixed, pitch, history, chunk, channel, W: tl.constexpr, TAPS: tl.constexpr):
    """The last W - 1 inputs [N, TAPS] of some channels at the end of the chunk."""
    row = chunk + tl.arange(0, TAPS)[None, :] - (W - 1)
    at = channel[:, None]
    kept = (at >= 0) & (row < chunk)
    new = tl.load(mixed + row.to(tl.int64) * pitch + at, mask=kept & (row >= 0), other=0.0)
    old = tl.load(history + at * (W - 1) + (row + W - 1), mask=kept & (row < 0), other=0.0)
    return tl.where(row >= 0, new, old)


@triton.jit
def _keep_history(moved, layer, channel, W: tl.constexpr, TAPS: tl.constexpr):
    place = tl.arange(0, TAPS)[None, :]
    new = address(layer, PREFIX_HISTORY_OUT, moved.dtype) + channel[:, None] * (W - 1)
    tl.store(new + place, moved, mask=(channel >= 0)[:, None] & (place < W - 1))


@triton.jit
def _ask_for_channels(weight, history, channel, W: tl.constexpr):
    """Have what a loop over some channels reads for the first time in the L2 cache."""
    prefetch(weight.to(history.dtype) + channel * W)
    prefetch(history + channel * (W - 1))


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
    SLAB: tl.constexpr,
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
    K_SLAB: tl.constexpr = min(SLAB, K)
    V_SLAB: tl.constexpr = min(SLAB, V)
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
        block = unit // (KINDS * HV)
        kind = (unit // HV) % KINDS
        head = unit % HV
        first = block * ROWS
        k_from = (head // GROUP) * K
        k_at = HK * K + k_from + tl.arange(0, K)
        v_at = 2 * HK * K + head * V + tl.arange(0, V)
        near = tl.arange(0, ROWS)
        row = first + near
        far = row.to(tl.int64)
        chunk = tl.load(header + CHUNK).to(tl.int32)
        history = address(layer, PREFIX_HISTORY_IN, DTYPE)
        if first < chunk:
            if kind == VALUES:
                if V_SLAB < V:
                    _ask_for_channels(weight, history, v_at, W)
                if AHEAD & (block == 0):
                    _ask_for_states(header, layer, head, K, V, W)
                shifted = _moved_history(mixed, mixed_pitch, history, chunk, v_at, W, TAPS)
                for start in tl.range(0, V, V_SLAB, num_stages=1):
                    v_to = head * V + start + tl.arange(0, V_SLAB)
                    v = _convolved_rows(
                        mixed,
                        mixed_pitch,
                        history,
                        weight,
                        bias,
                        first,
                        chunk,
                        2 * HK * K + v_to,
                        ROWS,
                        BIAS,
                        W,
                        TAPS,
                    )
                    tl.store(values + far[:, None] * (HV * V) + v_to[None, :], v.to(DTYPE))
                if block == 0:
                    _keep_history(shifted, layer, v_at, W, TAPS)
            else:
                # One path for both, of k with k or of q with k: half the instructions to fetch.
                solves = kind == SYSTEM
                moved_at = k_at - tl.where(solves, 0, HK * K)
                if K_SLAB < K:
                    _ask_for_channels(weight, history, k_at, W)
                    _ask_for_channels(weight, history, moved_at, W)
                moved = _moved_history(mixed, mixed_pitch, history, chunk, moved_at, W, TAPS)
                used = row < chunk
                a_in = tl.load(a + far * a_pitch + head, mask=used, other=0.0)
                b_in = tl.load(b + far * b_pitch + head, mask=used, other=0.0)
                rate, time = tl.load(log_rate + head), tl.load(time_bias + head)
                stored = tl.where(solves, keys, queries)
                matrix = tl.zeros([ROWS, ROWS], tl.float32)
                k_square = tl.zeros([ROWS], tl.float32)
                square = tl.zeros([ROWS], tl.float32)
                for start in tl.range(0, K, K_SLAB, num_stages=1):
                    slab = k_from + start + tl.arange(0, K_SLAB)
                    k = _convolved_rows(
                        mixed,
                        mixed_pitch,
                        history,
                        weight,
                        bias,
                        first,
                        chunk,
                        HK * K + slab,
                        ROWS,
                        BIAS,
                        W,
                        TAPS,
                    )
                    if solves:
                        other = k
                    else:
                        other = _convolved_rows(
                            mixed,
                            mixed_pitch,
                            history,
                            weight,
                            bias,
                            first,
                            chunk,
                            slab,
                            ROWS,
                            BIAS,
                            W,
                            TAPS,
                        )
                    k_square += tl.sum(k * k, 1)
                    square += tl.sum(other * other, 1)
                    other = other.to(DTYPE)
                    matrix += exact_product(other, tl.trans(k.to(DTYPE)))
                    if head % GROUP == 0:
                        tl.store(stored + far[:, None] * (HK * K) + slab[None, :], other)
                g, beta = gates(a_in, b_in, rate, time, DTYPE)
                # Differences of long sums: fp64, so that a strong decay does not blur later rows.
                g = tl.where(used, g, 0.0).to(tl.float64)
                beta = tl.where(used, beta, 0.0)
                sums = tl.cumsum(g, 0)
                k_scale = inverse_length(k_square)
                scale = inverse_length(square) * tl.where(solves, beta, K**-0.5)
                matrix *= _decayed(sums, ROWS) * scale[:, None] * k_scale[None, :]
                place = block.to(tl.int64) * HV + head
                factor = factors + place * (FACTORS * ROWS) + near
                tl.store(
                    factor + tl.where(solves, READ, ASK) * ROWS,
                    scale * tl.exp(sums.to(tl.float32)),
                )
                if solves:
                    whole = tl.sum(g, 0)
                    rest = tl.exp((whole - sums).to(tl.float32))
                    tl.store(factor + BETA * ROWS, beta)
                    tl.store(factor + WRITE * ROWS, k_scale * rest)
                    tl.store(decays + place, tl.exp(whole.to(tl.float32)))
                    matrix = tl.where(near[:, None] > near[None, :], matrix, 0.0)
                    matrix = unit_lower_inverse(matrix, tl.minimum(chunk, ROWS), ROWS)
                result = tl.where(solves, inverses, scores) + place * (ROWS * ROWS)
                tl.store(result + near[:, None] * ROWS + near[None, :], matrix)
                if (block == 0) & (head % GROUP == 0):
                    _keep_history(moved, layer, moved_at, W, TAPS)
