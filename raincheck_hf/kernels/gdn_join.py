# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""The live state after its checkpoint moved: boundary repair, then join."""

from __future__ import annotations

import triton
import triton.language as tl

from raincheck_hf.kernels.descriptor import (
    LEAD,
    LEAD_BETA_IN,
    LEAD_BETA_OUT,
    LEAD_G_IN,
    LEAD_G_OUT,
    LEAD_INPUTS_IN,
    LEAD_INPUTS_OUT,
    LEAD_STATE_IN,
    LEAD_STATE_OUT,
    LIVE_HISTORY_IN,
    LIVE_HISTORY_OUT,
    LIVE_STATE_IN,
    LIVE_STATE_OUT,
    MAPPED,
    PHI_IN,
    PHI_OUT,
    PREFIX_HISTORY_OUT,
    PREFIX_STATE_OUT,
    RECORD,
    TOKEN,
)
from raincheck_hf.kernels.gdn_parts import activated, address, inverse_norm


@triton.jit
def _lead_convolved(
    prefix,
    inputs,
    weight,
    bias,
    channel,
    count,
    W: tl.constexpr,
    TOKENS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """SiLU of the convolution [TOKENS, N] at the lead tokens, behind the moved prefix."""
    token = tl.arange(0, TOKENS)[:, None]
    total = tl.zeros([TOKENS, channel.shape[0]], tl.float32)
    at = channel[None, :]
    for tap in tl.static_range(W):
        # Counted from the first input of the prefix history.
        place = token + tap
        old = tl.load(
            prefix + at * (W - 1) + place,
            mask=(at >= 0) & (place < W - 1) & (count > 0),
            other=0.0,
        ).to(tl.float32)
        own = tl.load(
            inputs + at * (W - 1) + place - (W - 1),
            mask=(at >= 0) & (place >= W - 1) & (token < count),
            other=0.0,
        ).to(tl.float32)
        scale = tl.load(weight + channel * W + tap).to(tl.float32)
        total += (old + own) * scale[None, :]
    if BIAS:
        total += tl.load(bias + channel).to(tl.float32)[None, :]
    return activated(total, prefix.dtype.element_ty)


@triton.jit
def _live_window(prefix, inputs, layer, channel, count, token, W: tl.constexpr):
    """The live history of some channels after the checkpoint moved."""
    DTYPE: tl.constexpr = prefix.dtype.element_ty
    new = address(layer, LIVE_HISTORY_OUT, DTYPE) + channel * (W - 1)
    if count < W - 1:
        for tap in tl.static_range(W - 1):
            place = count + tap
            if place < W - 1:
                x = tl.load(prefix + channel * (W - 1) + place)
            else:
                x = tl.load(inputs + channel * (W - 1) + place - (W - 1))
            tl.store(new + tap, x)
    elif token == 0:
        old = address(layer, LIVE_HISTORY_IN, DTYPE) + channel * (W - 1)
        for tap in tl.static_range(W - 1):
            tl.store(new + tap, tl.load(old + tap))


@triton.jit
def lead_tokens(
    weight,
    bias,
    header,
    layer,
    head,
    column,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    TOKENS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """What the lead tokens do to some columns of one head, from the moved prefix.

    Nothing here waits for the moved state, so that it is read while that is computed.

    Args:
        weight: [C, W].
        bias: [C], or anything without BIAS.
        header: see ``descriptor``.
        layer: see ``descriptor``.
        head: value head.
        column: of the state.
        HK, HV, K, V, W: sizes.
        TOKENS: a power of two, W - 1 or more.
        BIAS: whether there is one.

    Returns:
        How many there are after the pass; alpha [TOKENS], beta [TOKENS], k [TOKENS, K] and
        v [TOKENS, N]. Behind the lead alpha is 1 and beta 0: no decay, no write.
    """
    DTYPE: tl.constexpr = weight.dtype.element_ty
    token = tl.load(header + TOKEN) > 0
    record = token & (tl.load(header + RECORD) > 0)
    lead = tl.load(header + LEAD).to(tl.int32)
    appends = record & (lead < W - 1)
    count = tl.where(token, tl.where(record, tl.minimum(lead + 1, W - 1), 0), lead)
    prefix = address(layer, PREFIX_HISTORY_OUT, DTYPE)
    inputs = address(layer, tl.where(appends, LEAD_INPUTS_OUT, LEAD_INPUTS_IN), DTYPE)
    all_g = address(layer, tl.where(appends, LEAD_G_OUT, LEAD_G_IN), tl.float32)
    all_beta = address(layer, tl.where(appends, LEAD_BETA_OUT, LEAD_BETA_IN), tl.float32)
    row = tl.arange(0, TOKENS)
    alpha = tl.exp(tl.load(all_g + row * HV + head, mask=row < count, other=0.0))
    beta = tl.load(all_beta + row * HV + head, mask=row < count, other=0.0)
    k_at = HK * K + (head // (HV // HK)) * K + tl.arange(0, K)
    v_at = 2 * HK * K + head * V + column
    k = _lead_convolved(prefix, inputs, weight, bias, k_at, count, W, TOKENS, BIAS)
    k *= inverse_norm(k, 1)[:, None]
    v = _lead_convolved(prefix, inputs, weight, bias, v_at, count, W, TOKENS, BIAS)
    return count, alpha, beta, k, v


@triton.jit
def repair_and_join(
    moved,
    count,
    alphas,
    betas,
    keys,
    values,
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
    TOKENS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Some columns of one head.

    Args:
        moved: fp32 [K, WIDTH], the new checkpoint.
        count: with the next four, from ``lead_tokens``; 1 or more.
        alphas: [TOKENS].
        betas: [TOKENS].
        keys: [TOKENS, K].
        values: [TOKENS, WIDTH].
        header: see ``descriptor``.
        layer: see ``descriptor``.
        head: value head.
        part: which columns.
        HK, HV, K, V, W, TOKENS: sizes.
        WIDTH: columns.
        DTYPE: the model's.
    """
    GROUP: tl.constexpr = HV // HK
    token = tl.load(header + TOKEN) > 0
    record = token & (tl.load(header + RECORD) > 0)
    lead = tl.load(header + LEAD).to(tl.int32)
    appends = record & (lead < W - 1)
    extends = record & (lead == W - 1)
    mapped = extends | (tl.load(header + MAPPED) > 0)
    lead_old = address(layer, LEAD_STATE_IN, tl.float32)
    lead_new = address(layer, LEAD_STATE_OUT, tl.float32)
    live = address(layer, tl.where(token, LIVE_STATE_OUT, LIVE_STATE_IN), tl.float32)
    new = address(layer, LIVE_STATE_OUT, tl.float32)
    phi = address(layer, tl.where(extends, PHI_OUT, PHI_IN), tl.float32) + head * K * K
    dim = tl.arange(0, K)
    column = part * WIDTH + tl.arange(0, WIDTH)
    tile_at = head * K * V + dim[:, None] * V + column[None, :]

    row = tl.arange(0, TOKENS)
    state = moved
    for index in tl.static_range(W - 1):
        alpha = tl.sum(tl.where(row == index, alphas, 0.0), 0)
        beta = tl.sum(tl.where(row == index, betas, 0.0), 0)
        key = tl.sum(tl.where((row == index)[:, None], keys, 0.0), 0)
        value = tl.sum(tl.where((row == index)[:, None], values, 0.0), 0)
        change = beta * (value - alpha * tl.sum(state * key[:, None], 0))
        state = alpha * state + key[:, None] * change[None, :]
    tl.store(lead_new + tile_at, state)
    if mapped:
        shift = state - tl.load(lead_old + tile_at)
        HEIGHT: tl.constexpr = 64 if K > 64 else K
        for start in range(0, K, HEIGHT):
            rows = start + tl.arange(0, HEIGHT)
            some_at = head * K * V + rows[:, None] * V + column[None, :]
            tile = tl.load(phi + rows[:, None] * K + dim[None, :])
            old = tl.load(live + some_at)
            tl.store(new + some_at, old + tl.dot(tile, shift, input_precision="tf32x3"))
    else:
        tl.store(new + tile_at, state)

    prefix = address(layer, PREFIX_HISTORY_OUT, DTYPE)
    inputs = address(layer, tl.where(appends, LEAD_INPUTS_OUT, LEAD_INPUTS_IN), DTYPE)
    q_at = (head // GROUP) * K + dim
    _live_window(prefix, inputs, layer, 2 * HK * K + head * V + column, count, token, W)
    if (part == 0) & (head % GROUP == 0):
        _live_window(prefix, inputs, layer, q_at, count, token, W)
        _live_window(prefix, inputs, layer, HK * K + q_at, count, token, W)


@triton.jit
def join_kernel(
    weight,
    bias,
    header,
    layer,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """The join by itself; grid (HV, V / WIDTH)."""
    head = tl.program_id(0)
    part = tl.program_id(1)
    dim = tl.arange(0, K)
    column = part * WIDTH + tl.arange(0, WIDTH)
    tile_at = head * K * V + dim[:, None] * V + column[None, :]
    count, alpha, beta, k, v = lead_tokens(
        weight, bias, header, layer, head, column, HK, HV, K, V, W, TOKENS, BIAS
    )
    if count > 0:
        moved = tl.load(address(layer, PREFIX_STATE_OUT, tl.float32) + tile_at)
        repair_and_join(
            moved,
            count,
            alpha,
            beta,
            k,
            v,
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
            weight.dtype.element_ty,
        )
