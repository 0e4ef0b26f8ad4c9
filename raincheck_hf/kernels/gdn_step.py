# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""The decode row: one token of the gated delta rule, its record and its step of the suffix map."""

from __future__ import annotations

import triton
import triton.language as tl

from raincheck_hf.kernels.descriptor import (
    CHUNK,
    LEAD,
    LEAD_BETA_IN,
    LEAD_BETA_OUT,
    LEAD_G_IN,
    LEAD_G_OUT,
    LEAD_INPUTS_IN,
    LEAD_INPUTS_OUT,
    LEAD_STATE_OUT,
    LIVE_HISTORY_IN,
    LIVE_HISTORY_OUT,
    LIVE_STATE_IN,
    LIVE_STATE_OUT,
    MAPPED,
    PHI_IN,
    PHI_OUT,
    RECORD,
    TOKEN,
)
from raincheck_hf.kernels.gdn_parts import (
    activated,
    address,
    channel_weights,
    gates,
    inverse_norm,
    rounded,
    weight_at,
)


@triton.jit
def _convolved(x, history, kept, bias, channel, BIAS: tl.constexpr, W: tl.constexpr):
    """SiLU of the convolution at the token: inputs x [N] behind their history."""
    total = x.to(tl.float32) * weight_at(kept, W - 1, x.dtype)
    for tap in tl.static_range(W - 1):
        past = tl.load(history + channel * (W - 1) + tap).to(tl.float32)
        total += past * weight_at(kept, tap, x.dtype)
    if BIAS:
        total += tl.load(bias + channel).to(tl.float32)
    return activated(total, x.dtype)


@triton.jit
def _keep_inputs(x, layer, channel, appends, lead, W: tl.constexpr):
    """The live history after the token, and its column of the lead."""
    past = address(layer, LIVE_HISTORY_IN, x.dtype) + channel * (W - 1)
    new = address(layer, LIVE_HISTORY_OUT, x.dtype) + channel * (W - 1)
    for tap in tl.static_range(W - 2):
        tl.store(new + tap, tl.load(past + tap + 1))
    tl.store(new + W - 2, x)
    if appends:
        old = address(layer, LEAD_INPUTS_IN, x.dtype) + channel * (W - 1)
        new = address(layer, LEAD_INPUTS_OUT, x.dtype) + channel * (W - 1)
        for tap in tl.static_range(W - 1):
            kept = tl.load(old + tap, mask=(channel >= 0) & (tap < lead), other=0.0)
            tl.store(new + tap, tl.where(tap < lead, kept, x), mask=(channel >= 0) & (tap <= lead))


@triton.jit
def _keep_factor(value, layer, head, lead, IN, OUT, HV: tl.constexpr, W: tl.constexpr):
    """g or beta of the token behind those of the lead."""
    old = address(layer, IN, tl.float32) + head
    new = address(layer, OUT, tl.float32) + head
    for row in tl.static_range(W - 1):
        if row < lead:
            tl.store(new + row * HV, tl.load(old + row * HV))
    tl.store(new + lead * HV, value)


@triton.jit
def decode_row(
    mixed,
    a,
    b,
    out,
    weight,
    bias,
    log_rate,
    time_bias,
    header,
    layer,
    head,
    part,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Some columns of one value head: of its state, or behind these of its map.

    With reads r = S^T k and p = S^T q of the old state, the new one needs no second look:
    d = beta (v - alpha r), S <- alpha S + k d^T, and the output is alpha p + (q k) d. A map does
    the same with v = 0.

    Args:
        mixed: the decode row [C].
        a: its projection [HV].
        b: its projection [HV].
        out: its output [HV V].
        weight: [C, W], or int64 [C], see ``channel_weights``.
        bias: [C], or anything without BIAS.
        log_rate: [HV].
        time_bias: [HV].
        header: see ``descriptor``.
        layer: see ``descriptor``.
        head: value head.
        part: which columns: V / WIDTH parts of the state, then K / WIDTH of the map.
        HK, HV, K, V, W: sizes.
        WIDTH: columns of a part.
        BIAS: whether there is one.
    """
    STATES: tl.constexpr = V // WIDTH
    GROUP: tl.constexpr = HV // HK
    DTYPE: tl.constexpr = mixed.dtype.element_ty
    # All that no other load decides comes before the first branch: its latencies then overlap.
    token = tl.load(header + TOKEN) > 0
    record = token & (tl.load(header + RECORD) > 0)
    lead = tl.load(header + LEAD).to(tl.int32)
    mapped = tl.load(header + MAPPED) > 0
    of_map = part >= STATES
    old = address(layer, tl.where(of_map, PHI_IN, LIVE_STATE_IN), tl.float32)
    new = address(layer, tl.where(of_map, PHI_OUT, LIVE_STATE_OUT), tl.float32)
    history = address(layer, LIVE_HISTORY_IN, DTYPE)
    dim = tl.arange(0, K)
    column = (part - tl.where(of_map, STATES, 0)) * WIDTH + tl.arange(0, WIDTH)
    q_at = (head // GROUP) * K + dim
    k_at = HK * K + q_at
    v_at = 2 * HK * K + head * V + tl.where(of_map, 0, column)
    q_in = tl.load(mixed + q_at)
    k_in = tl.load(mixed + k_at)
    v_in = tl.load(mixed + v_at)
    q_taps = channel_weights(weight, q_at, W)
    k_taps = channel_weights(weight, k_at, W)
    v_taps = channel_weights(weight, v_at, W)
    g, beta = gates(
        tl.load(a + head),
        tl.load(b + head),
        tl.load(log_rate + head),
        tl.load(time_bias + head),
        DTYPE,
    )
    if token:
        if (part < STATES) | (record & (lead == W - 1)):
            pitch = tl.multiple_of(tl.where(of_map, K, V), 16)
            tile_at = head * K * pitch + dim[:, None] * pitch + column[None, :]
            identity = of_map & (mapped == 0)
            tile = tl.load(old + tile_at, mask=(dim >= 0)[:, None] & (identity == 0), other=0.0)
            tile = tl.where(identity & (dim[:, None] == column[None, :]), 1.0, tile)
            q = _convolved(q_in, history, q_taps, bias, q_at, BIAS, W)
            k = _convolved(k_in, history, k_taps, bias, k_at, BIAS, W)
            v = _convolved(v_in, history, v_taps, bias, v_at, BIAS, W)
            q = q * inverse_norm(q, 0) * (K**-0.5)
            k = k * inverse_norm(k, 0)
            alpha = tl.exp(g)
            change = beta * (tl.where(of_map, 0.0, v) - alpha * tl.sum(tile * k[:, None], 0))
            answer = alpha * tl.sum(tile * q[:, None], 0) + tl.sum(q * k, 0) * change
            tile = alpha * tile + k[:, None] * change[None, :]
            tl.store(new + tile_at, tile)
            if part < STATES:
                appends = record & (lead < W - 1)
                tl.store(out + head * V + column, rounded(answer, DTYPE))
                # With a chunk the lead ends elsewhere: in the repaired state.
                if appends & (tl.load(header + CHUNK) == 0):
                    tl.store(address(layer, LEAD_STATE_OUT, tl.float32) + tile_at, tile)
                _keep_inputs(v_in, layer, v_at, appends, lead, W)
                if part == 0:
                    if head % GROUP == 0:
                        _keep_inputs(q_in, layer, q_at, appends, lead, W)
                        _keep_inputs(k_in, layer, k_at, appends, lead, W)
                    if appends:
                        _keep_factor(g, layer, head, lead, LEAD_G_IN, LEAD_G_OUT, HV, W)
                        _keep_factor(beta, layer, head, lead, LEAD_BETA_IN, LEAD_BETA_OUT, HV, W)
    elif part < STATES:
        tl.store(out + head * V + column, tl.zeros([WIDTH], DTYPE))


@triton.jit
def step_kernel(
    mixed,
    a,
    b,
    out,
    weight,
    bias,
    log_rate,
    time_bias,
    header,
    layer,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A pass that is only the decode row; grid (HV, V / WIDTH + K / WIDTH)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    decode_row(
        mixed,
        a,
        b,
        out,
        weight,
        bias,
        log_rate,
        time_bias,
        header,
        layer,
        tl.program_id(0),
        tl.program_id(1),
        HK,
        HV,
        K,
        V,
        W,
        WIDTH,
        BIAS,
    )


@triton.jit
def map_step_kernel(
    phi, keys, g, beta, out, K: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr
):
    """alpha (Phi - beta k (k^T Phi)) of some columns of one head; grid (HV, K / WIDTH)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    dim = tl.arange(0, K)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at = head * K * K + dim[:, None] * K + column[None, :]
    tile = tl.load(phi + at)
    k = tl.load(keys + head * K + dim)
    alpha = tl.exp(tl.load(g + head))
    change = -alpha * tl.load(beta + head) * tl.sum(tile * k[:, None], 0)
    tl.store(out + at, alpha * tile + k[:, None] * change[None, :])
