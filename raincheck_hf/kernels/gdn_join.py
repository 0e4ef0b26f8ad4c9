# mypy: disable-error-code="no-untyped-def,assignment"
# An annotation in a jitted function speaks to Triton; a tuple grows while a loop is unrolled.
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
from raincheck_hf.kernels.gdn_parts import (
    activated,
    address,
    channel_weights,
    inverse_norm,
    prefetch,
    split,
    split_product,
    weight_at,
)


@triton.jit
def _either(layer, choice, ONE: tl.constexpr, OTHER: tl.constexpr, DTYPE: tl.constexpr):
    """One of two addresses. Both are read, so that neither read waits for the choice."""
    one, other = address(layer, ONE, DTYPE), address(layer, OTHER, DTYPE)
    return tl.multiple_of(tl.where(choice, one, other), 16)


@triton.jit
def lead_sources(header, layer, W: tl.constexpr, DTYPE: tl.constexpr):
    """What else the lead's replay and the join need to be told; read in two looks, with no branch.

    Args:
        header: see ``descriptor``.
        layer: see ``descriptor``.
        W: the convolution's width.
        DTYPE: the model's.

    Returns:
        Of the pass: whether it has a token; whether there is a map after it; how many lead tokens
        there are after it. Then addresses: the prefix history after the pass; the lead's inputs, g
        and beta; the live history before and after; the lead's state before and after; the live
        state with the token, and where it goes; the map with the token.
    """
    token = tl.load(header + TOKEN) > 0
    record = token & (tl.load(header + RECORD) > 0)
    lead = tl.load(header + LEAD).to(tl.int32)
    appends = record & (lead < W - 1)
    extends = record & (lead == W - 1)
    mapped = extends | (tl.load(header + MAPPED) > 0)
    count = tl.where(token, tl.where(record, tl.minimum(lead + 1, W - 1), 0), lead)
    return (
        token,
        mapped,
        count,
        address(layer, PREFIX_HISTORY_OUT, DTYPE),
        _either(layer, appends, LEAD_INPUTS_OUT, LEAD_INPUTS_IN, DTYPE),
        _either(layer, appends, LEAD_G_OUT, LEAD_G_IN, tl.float32),
        _either(layer, appends, LEAD_BETA_OUT, LEAD_BETA_IN, tl.float32),
        address(layer, LIVE_HISTORY_IN, DTYPE),
        address(layer, LIVE_HISTORY_OUT, DTYPE),
        address(layer, LEAD_STATE_IN, tl.float32),
        address(layer, LEAD_STATE_OUT, tl.float32),
        _either(layer, token, LIVE_STATE_OUT, LIVE_STATE_IN, tl.float32),
        address(layer, LIVE_STATE_OUT, tl.float32),
        _either(layer, extends, PHI_OUT, PHI_IN, tl.float32),
    )


@triton.jit
def _column(one, other, place, channel, wanted, W: tl.constexpr):
    """Inputs [N] of some channels at a place, counted through two histories [C, W - 1]."""
    at = channel * (W - 1)
    source = tl.where(place < W - 1, one + at + place, other + at + place - (W - 1))
    return tl.load(source, mask=(channel >= 0) & wanted, other=0.0)


@triton.jit
def _lead_row(sources, kept, bias, channel, token, BIAS: tl.constexpr, W: tl.constexpr):
    """SiLU of the convolution [N] at a lead token, behind the moved prefix."""
    _, _, count, prefix, inputs, _, _, _, _, _, _, _, _, _ = sources
    DTYPE: tl.constexpr = prefix.dtype.element_ty
    total = tl.zeros(channel.shape, tl.float32)
    for tap in tl.static_range(W):
        # Behind the lead there may be anything: such a token must at least be a number.
        wanted = (count > 0) & (token + tap - (W - 1) < count)
        x = _column(prefix, inputs, token + tap, channel, wanted, W)
        total += x.to(tl.float32) * weight_at(kept, tap, DTYPE)
    if BIAS:
        total += tl.load(bias + channel).to(tl.float32)
    return activated(total, DTYPE)


@triton.jit
def _live_window(sources, channel, wanted, W: tl.constexpr):
    """The live history of some channels after the checkpoint moved, W - 1 times [N].

    Not read where the pass's token has written it already, or nobody wants it.
    """
    token, _, count, prefix, inputs, _, _, old, _, _, _, _, _, _ = sources
    due = wanted & (count > 0) & ((count < W - 1) | (token == 0))
    # With a whole lead nothing changes.
    whole = count == W - 1
    one, other = tl.where(whole, old, prefix), tl.where(whole, old, inputs)
    skip = tl.where(whole, 0, count)
    window = ()
    for tap in tl.static_range(W - 1):
        window = window + (_column(one, other, skip + tap, channel, due, W),)
    return window


@triton.jit
def _keep_window(window, sources, channel, wanted, W: tl.constexpr):
    token, _, count, _, _, _, _, _, new, _, _, _, _, _ = sources
    due = wanted & (count > 0) & ((count < W - 1) | (token == 0))
    for tap in tl.static_range(W - 1):
        tl.store(new + channel * (W - 1) + tap, window[tap], mask=(channel >= 0) & due)


@triton.jit
def _channels(
    head,
    part,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Of a program: channels of q, of k and of its v; and whether q and k are its to write."""
    GROUP: tl.constexpr = HV // HK
    q_at = (head // GROUP) * K + tl.arange(0, K)
    v_at = 2 * HK * K + head * V + part * WIDTH + tl.arange(0, WIDTH)
    return q_at, HK * K + q_at, v_at, (part == 0) & (head % GROUP == 0)


@triton.jit
def lead_tokens(
    weight,
    bias,
    sources,
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
    """What the lead tokens do to some columns of one head, from the moved prefix.

    Nothing here waits for the moved state, so that it is read while that is computed.

    Args:
        weight: [C, W], or int64 [C], see ``channel_weights``.
        bias: [C], or anything without BIAS.
        sources: of ``lead_sources``.
        head: value head.
        part: which columns of the state.
        HK, HV, K, V, W: sizes.
        WIDTH: columns of a part.
        BIAS: whether there is one.

    Returns:
        alpha, beta, k [K] and v [WIDTH] of W - 1 tokens. Behind the lead alpha is 1 and beta 0: no
        decay, no write.
    """
    _, _, count, _, _, all_g, all_beta, _, _, _, _, _, _, _ = sources
    _, k_at, v_at, _ = _channels(head, part, HK, HV, K, V, WIDTH)
    k_taps, v_taps = channel_weights(weight, k_at, W), channel_weights(weight, v_at, W)
    alphas, betas, keys, values = (), (), (), ()
    for token in tl.static_range(W - 1):
        at = token * HV + head
        alphas = alphas + (tl.exp(tl.load(all_g + at, mask=token < count, other=0.0)),)
        betas = betas + (tl.load(all_beta + at, mask=token < count, other=0.0),)
        k = _lead_row(sources, k_taps, bias, k_at, token, BIAS, W)
        keys = keys + (k * inverse_norm(k, 0),)
        values = values + (_lead_row(sources, v_taps, bias, v_at, token, BIAS, W),)
    return alphas, betas, keys, values


@triton.jit
def join_tiles(
    sources,
    head,
    part,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """What ``repair_and_join`` reads; asked for early, it is there when needed.

    The live state and the map are only brought near: once in registers, they would have to change
    their layout for the product, and all behind them would wait for that.

    Args:
        sources: of ``lead_sources``.
        head: value head.
        part: which columns.
        HK, HV, K, V, W, WIDTH: as there.

    Returns:
        The lead's state before [K, WIDTH]; the live histories of q, k and v, where they are due.
    """
    _, mapped, count, _, _, _, _, _, _, lead_old, _, live, _, phi = sources
    dim = tl.arange(0, K)
    column = part * WIDTH + tl.arange(0, WIDTH)
    joins = mapped & (count > 0)
    tile_at = head * K * V + dim[:, None] * V + column[None, :]
    before = tl.load(lead_old + tile_at, mask=(dim >= 0)[:, None] & joins, other=0.0)
    if joins:
        prefetch(live + head * K * V + dim * V + part * WIDTH)
        # Of the map, which all programs of a head read, each asks for a share.
        LINES: tl.constexpr = K * K * WIDTH // (32 * V)
        prefetch(phi + head * K * K + 32 * (part * LINES + tl.arange(0, LINES)))
    q_at, k_at, v_at, first = _channels(head, part, HK, HV, K, V, WIDTH)
    return (
        before,
        _live_window(sources, q_at, first, W),
        _live_window(sources, k_at, first, W),
        _live_window(sources, v_at, True, W),
    )


@triton.jit
def repair_and_join(
    moved,
    tokens,
    tiles,
    sources,
    head,
    part,
    HK: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
):
    """Some columns of one head; nothing, where there is no lead after the pass.

    Args:
        moved: fp32 [K, WIDTH], the new checkpoint.
        tokens: of ``lead_tokens``.
        tiles: of ``join_tiles``.
        sources: of ``lead_sources``.
        head: value head.
        part: which columns.
        HK, HV, K, V, W: sizes.
        WIDTH: columns.
        HEIGHT: rows of the map that are read at once.
    """
    alphas, betas, keys, values = tokens
    before, q_window, k_window, v_window = tiles
    _, mapped, count, _, _, _, _, _, _, _, lead_new, live, new, phi = sources
    dim = tl.arange(0, K)
    slab = tl.arange(0, HEIGHT)
    column = part * WIDTH + tl.arange(0, WIDTH)
    tile_at = head * K * V + dim[:, None] * V + column[None, :]
    some_at = head * K * V + slab[:, None] * V + column[None, :]
    map_at = head * K * K + slab[:, None] * K + dim[None, :]
    some = (slab >= 0)[:, None] & mapped & (count > 0)
    old = tl.load(live + some_at, mask=some, other=0.0)
    tile = tl.load(phi + map_at, mask=some, other=0.0)
    if count > 0:
        state = moved
        for token in tl.static_range(W - 1):
            read = tl.sum(state * keys[token][:, None], 0)
            change = betas[token] * (values[token] - alphas[token] * read)
            state = alphas[token] * state + keys[token][:, None] * change[None, :]
        tl.store(lead_new + tile_at, state)
        q_at, k_at, v_at, first = _channels(head, part, HK, HV, K, V, WIDTH)
        _keep_window(q_window, sources, q_at, first, W)
        _keep_window(k_window, sources, k_at, first, W)
        _keep_window(v_window, sources, v_at, True, W)
        if mapped:
            high, low = split(state - before)
            for start in tl.static_range(0, K, HEIGHT):
                tile_high, tile_low = split(tile)
                joined = old + split_product(tile_high, tile_low, high, low)
                if start + HEIGHT < K:
                    tile = tl.load(phi + (start + HEIGHT) * K + map_at)
                    old = tl.load(live + (start + HEIGHT) * V + some_at)
                tl.store(new + start * V + some_at, joined)
        else:
            tl.store(new + tile_at, state)


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
    HEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The join by itself; grid (HV, V / WIDTH)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    part = tl.program_id(1)
    dim = tl.arange(0, K)
    column = part * WIDTH + tl.arange(0, WIDTH)
    tile_at = head * K * V + dim[:, None] * V + column[None, :]
    start = address(layer, PREFIX_STATE_OUT, tl.float32)
    sources = lead_sources(header, layer, W, bias.dtype.element_ty)
    moved = tl.load(start + tile_at, mask=(dim >= 0)[:, None] & (sources[2] > 0), other=0.0)
    tiles = join_tiles(sources, head, part, HK, HV, K, V, W, WIDTH)
    tokens = lead_tokens(weight, bias, sources, head, part, HK, HV, K, V, W, WIDTH, BIAS)
    repair_and_join(moved, tokens, tiles, sources, head, part, HK, HV, K, V, W, WIDTH, HEIGHT)
