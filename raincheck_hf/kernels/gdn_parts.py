# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""What the kernels of the gated delta rule share, on the device."""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter truncates where it rounds to bf16, and multiplies bf16 matrices by their
# bits. Interpreted kernels therefore round by hand and multiply in fp32.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_ROUND = tl.constexpr(0x7FFF)
_HIGH_16 = tl.constexpr(-(1 << 16))
_HIGH_19 = tl.constexpr(-(1 << 13))
_HALF_13 = tl.constexpr(1 << 12)


@triton.jit
def address(layer, entry, DTYPE: tl.constexpr):
    """The pointer that a layer's record holds at ``entry``."""
    return tl.multiple_of(tl.load(layer + entry).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """fp32 values, rounded to the nearest that DTYPE can hold."""
    if tl.float32 == DTYPE:
        result = x
    elif INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = bits + _ROUND + ((bits >> 16) & 1)
        result = (bits & _HIGH_16).to(tl.float32, bitcast=True)
    else:
        result = x.to(DTYPE).to(tl.float32)
    return result


@triton.jit
def activated(x, DTYPE: tl.constexpr):
    """SiLU of the convolution's sum, both rounded as the layer's own operators round them."""
    x = rounded(x, DTYPE)
    return rounded(x / (1.0 + tl.exp(-x)), DTYPE)


@triton.jit
def inverse_norm(x, AXIS: tl.constexpr):
    """1 / |x| as the layer takes it."""
    return inverse_length(tl.sum(x * x, AXIS))


@triton.jit
def inverse_length(square):
    """1 / |x| of |x|^2, as the layer takes it."""
    return tl.rsqrt(square + 1e-6)


@triton.jit
def gates(a, b, log_rate, time_bias, DTYPE: tl.constexpr):
    """g and beta, fp32, of projections a and b."""
    x = a.to(tl.float32) + time_bias.to(tl.float32)
    # log(1 + u) to full precision for small u: the rounding of 1 + u cancels in the quotient.
    u = tl.exp(-tl.abs(x))
    w = 1.0 + u
    tail = tl.where(w == 1.0, u, u * tl.log(w) / tl.where(w == 1.0, 1.0, w - 1.0))
    g = -tl.exp(log_rate.to(tl.float32)) * (tl.maximum(x, 0.0) + tail)
    return g, rounded(1.0 / (1.0 + tl.exp(-b.to(tl.float32))), DTYPE)


@triton.jit
def channel_weights(weight, channel, W: tl.constexpr):
    """The taps of some channels, for ``weight_at``.

    One 64-bit word a channel, where that holds them all: as single taps they would be read with
    many loads, each of which touches many lines.
    """
    if weight.dtype.element_ty == tl.int64:
        result = tl.load(weight + channel)
    else:
        result = weight + channel * W
    return result


@triton.jit
def weight_at(kept, tap, DTYPE: tl.constexpr):
    """fp32 weights of one tap."""
    if kept.dtype.is_ptr():
        result = tl.load(kept + tap).to(tl.float32)
    else:
        result = (kept >> (16 * tap)).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
    return result


@triton.jit
def prefetch(pointers):
    """Ask for the cache lines of some addresses, so that they are in the L2 cache when read."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def split(x):
    """fp32 values in two parts: the nearest that TF32 holds, and the rest.

    To the nearest, so that the rest has 12 bits and a sign. Of a rest of 13 bits the tensor cores
    cut off two, always downwards, which adds up over a sum.
    """
    high = ((x.to(tl.int32, bitcast=True) + _HALF_13) & _HIGH_19).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def added(a, b, total, once):
    """total + a @ b, in a loop of one turn.

    Where ``once`` is read on the device, the loop stays: products that stand side by side are taken
    for a chain by the compiler, which then has a warp compute whole rows, and warps repeat each
    other where there are few. With 1 it is as without the loop.
    """
    for _ in tl.range(0, once, num_stages=1):
        total = tl.dot(a, b, total, input_precision="tf32")
    return total


@triton.jit
def split_product(a_high, a_low, b_high, b_low, once):
    """a @ b to fp32 accuracy, of two split matrices: TF32 in three terms; once as in ``added``."""
    total = tl.zeros([a_high.shape[0], b_high.shape[1]], tl.float32)
    if INTERPRETED:
        result = added(a_high + a_low, b_high + b_low, total, once)
    else:
        total = added(a_low, b_high, total, once)
        total = added(a_high, b_low, total, once)
        result = added(a_high, b_high, total, once)
    return result


@triton.jit
def wide_product(a, b, once):
    """a @ b to fp32 accuracy, of fp32 matrices."""
    a_high, a_low = split(a)
    b_high, b_low = split(b)
    return split_product(a_high, a_low, b_high, b_low, once)


@triton.jit
def exact_product(a, b):
    """a @ b, fp32, of two matrices in the model's dtype."""
    if a.dtype == tl.float32:
        result = wide_product(a, b, 1)
    elif INTERPRETED:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        result = tl.dot(a, b)
    return result


@triton.jit
def product(a, b, once):
    """a @ b to fp32 accuracy: a in the model's dtype, b fp32; once as in ``added``.

    A 16-bit a is exact in the tensor cores, so that only b is split: into three bf16 pieces, or
    into two TF32 pieces beside fp16.
    """
    total = tl.zeros([a.shape[0], b.shape[1]], tl.float32)
    if a.dtype == tl.float32 or INTERPRETED:
        result = wide_product(a.to(tl.float32), b, once)
    elif a.dtype == tl.bfloat16:
        first = b.to(tl.bfloat16)
        rest = b - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        third = (rest - second.to(tl.float32)).to(tl.bfloat16)
        total = added(a, third, total, once)
        total = added(a, second, total, once)
        result = added(a, first, total, once)
    else:
        high, low = split(b)
        wide = a.to(tl.float32)
        total = added(wide, low, total, once)
        result = added(wide, high, total, once)
    return result


@triton.jit
def unit_lower_inverse(a, rows, ROWS: tl.constexpr):
    """(I + a)^-1 for a strictly lower triangular, fp32 [ROWS, ROWS]; ROWS is 16 or 32.

    By halves: where T inverts the diagonal blocks of size s, T - T M T inverts those of size 2s,
    with M the part of a between the two halves of each. Nothing grows on the way, as it would in a
    power series: every T consists of blocks of the result. All sizes run as whole matrices, in a
    loop: it multiplies many zeros, but its instructions are fetched once.
    """
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, ROWS)[None, :]
    # Between the halves of size 1, M is all that there is.
    inverse = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, a, 0.0)
    apart = row ^ column
    right = inverse
    size = 2
    while size < rows:
        # The halves of a block differ in that bit of their indices, and in none above it.
        between = (apart >= size) & (apart < 2 * size)
        for second in tl.range(0, tl.minimum(size, 2), num_stages=1):
            left = tl.where(second == 0, tl.where(between, a, 0.0), inverse)
            right = wide_product(left, right, tl.minimum(rows, 1))
        inverse -= right
        right = inverse
        size *= 2
    return inverse
