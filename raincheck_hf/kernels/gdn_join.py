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
def _inputs(one, other, place, channel, wanted, W: tl.constexpr):
    """Inputs [N, M] of some channels [N] at places [1, M] through two histories [C, W - 1]."""
    at = channel[:, None] * (W - 1) + place
    source = tl.where(place < W - 1, one + at, other + at - (W - 1))
    return tl.load(source, mask=(channel >= 0)[:, None] & wanted, other=0.0)


@triton.jit
def _lead_rows(
    sources, weight, bias, channel, BIAS: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr
):
    """SiLU of the convolution [N, TAPS] at the lead tokens, behind the moved prefix."""
    _, _, count, prefix, inputs, _, _, _, _, _, _, _, _, _ = sources
    DTYPE: tl.constexpr = prefix.dtype.element_ty
    kept = channel_weights(weight, channel, W)
    token = tl.arange(0, TAPS)[None, :]
    total = tl.zeros([channel.shape[0], TAPS], tl.float32)
    for tap in tl.range(0, W, num_stages=1):
        # Behind the lead there may be anything: such a token must at least be a number.
        wanted = (count > 0) & (token + tap - (W - 1) < count) & (token < W - 1)
        x = _inputs(prefix, inputs, token + tap, channel, wanted, W)
        total += x.to(tl.float32) * weight_at(kept, tap, DTYPE)[:, None]
    if BIAS:
        total += tl.load(bias + channel).to(tl.float32)[:, None]
    return activated(total, DTYPE)


@triton.jit
def _live_window(sources, channel, wanted, W: tl.constexpr, TAPS: tl.constexpr):
    """The live history of some channels after the checkpoint moved [N, TAPS].

    Not read where the pass's token has written it already, or nobody wants it.
    """
    token, _, count, prefix, inputs, _, _, old, _, _, _, _, _, _ = sources
    due = wanted & (count > 0) & ((count < W - 1) | (token == 0))
    # With a whole lead nothing changes.
    whole = count == W - 1
    one, other = tl.where(whole, old, prefix), tl.where(whole, old, inputs)
    tap = tl.arange(0, TAPS)[None, :]
    place = tl.where(whole, 0, count) + tap
    return _inputs(one, other, place, channel, due & (tap < W - 1), W)


@triton.jit
def _keep_window(window, sources, channel, wanted, W: tl.constexpr, TAPS: tl.constexpr):
    token, _, count, _, _, _, _, _, new, _, _, _, _, _ = sources
    due = wanted & (count > 0) & ((count < W - 1) | (token == 0))
    tap = tl.arange(0, TAPS)[None, :]
    mask = (channel >= 0)[:, None] & due & (tap < W - 1)
    tl.store(new + channel[:, None] * (W - 1) + tap, window, mask=mask)


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
    """Of a program: channels of q and k, and of its v; and whether q and k are its to write."""
    GROUP: tl.constexpr = HV // HK
    both = tl.arange(0, 2 * K)
    qk_at = (both // K) * (HK * K) + (head // GROUP) * K + both % K
    v_at = 2 * HK * K + head * V + part * WIDTH + tl.arange(0, WIDTH)
    return qk_at, v_at, (part == 0) & (head % GROUP == 0)


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
    TAPS: tl.constexpr,
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
        TAPS: W, or the next power of two.
        WIDTH: columns of a part.
        BIAS: whether there is one.

    Returns:
        alpha and beta [TAPS], k [K, TAPS] and v [WIDTH, TAPS], of the tokens of the lead.
    """
    _, _, count, _, _, all_g, all_beta, _, _, _, _, _, _, _ = sources
    _, v_at, _ = _channels(head, part, HK, HV, K, V, WIDTH)
    k_at = HK * K + (head // (HV // HK)) * K + tl.arange(0, K)
    token = tl.arange(0, TAPS)
    at = token * HV + head
    alphas = tl.exp(tl.load(all_g + at, mask=token < count, other=0.0))
    betas = tl.load(all_beta + at, mask=token < count, other=0.0)
    keys = _lead_rows(sources, weight, bias, k_at, BIAS, W, TAPS)
    values = _lead_rows(sources, weight, bias, v_at, BIAS, W, TAPS)
    return alphas, betas, keys * inverse_norm(keys, 0)[None, :], values


@triton.jit
def _of_token(values, token, TAPS: tl.constexpr):
    """Column ``token`` of values [N, TAPS]."""
    return tl.sum(tl.where(tl.arange(0, TAPS)[None, :] == token, values, 0.0), 1)


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
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """What ``repair_and_join`` reads; asked for early, it is there when needed.

    The live state and the map are only brought near: once in registers, they would have to change
    their layout for the product, and all behind them would wait for that.

    Args:
        sources: of ``lead_sources``.
        head: value head.
        part: which columns.
        HK, HV, K, V, W, TAPS, WIDTH: as there.

    Returns:
        The lead's state before [K, WIDTH]; the live histories of q and k, and of v, where due.
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
    qk_at, v_at, first = _channels(head, part, HK, HV, K, V, WIDTH)
    return (
        before,
        _live_window(sources, qk_at, first, W, TAPS),
        _live_window(sources, v_at, True, W, TAPS),
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
    TAPS: tl.constexpr,
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
        TAPS: W, or the next power of two.
        WIDTH: columns.
        HEIGHT: rows of the map that are read at once.
    """
    alphas, betas, keys, values = tokens
    before, qk_window, v_window = tiles
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
        for token in tl.range(0, count, num_stages=1):
            here = tl.arange(0, TAPS) == token
            alpha = tl.sum(tl.where(here, alphas, 0.0), 0)
            beta = tl.sum(tl.where(here, betas, 0.0), 0)
            key = _of_token(keys, token, TAPS)
            read = tl.sum(state * key[:, None], 0)
            change = beta * (_of_token(values, token, TAPS) - alpha * read)
            state = alpha * state + key[:, None] * change[None, :]
        tl.store(lead_new + tile_at, state)
        qk_at, v_at, first = _channels(head, part, HK, HV, K, V, WIDTH)
        _keep_window(qk_window, sources, qk_at, first, W, TAPS)
        _keep_window(v_window, sources, v_at, True, W, TAPS)
        if mapped:
            high, low = split(state - before)
            for start in tl.range(0, K, HEIGHT, num_stages=1):
                tile_high, tile_low = split(tile)
                joined = old + split_product(tile_high, tile_low, high, low, 1)
                tl.store(new + start * V + some_at, joined)
                more = (slab >= 0)[:, None] & (start + HEIGHT < K)
                tile = tl.load(phi + (start + HEIGHT) * K + map_at, mask=more, other=0.0)
                old = tl.load(live + (start + HEIGHT) * V + some_at, mask=more, other=0.0)
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
    TAPS: tl.constexpr,
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
    tiles = join_tiles(sources, head, part, HK, HV, K, V, W, TAPS, WIDTH)
    tokens = lead_tokens(weight, bias, sources, head, part, HK, HV, K, V, W, TAPS, WIDTH, BIAS)
    repair_and_join(moved, tokens, tiles, sources, head, part, HK, HV, K, V, W, TAPS, WIDTH, HEIGHT)
