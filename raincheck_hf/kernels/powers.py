# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Powers of two, some of them by the units that multiply and add.

A processor takes 16 powers a cycle and multiplies 128 numbers. Where powers are what binds, a share
of them can be a polynomial, as in FlashAttention-4: x = n + f with n the nearest integer, 2^f from
five coefficients, and 2^n from n as an exponent. The coefficients are those of degree 4 whose
greatest relative error on [-1/2, 1/2] is least, 2.6e-6; it alternates, so that sums are closer.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

_COEFFICIENTS = (
    0.9999992847442627, 0.6931217908859253, 0.240247443318367, 0.05591785907745361,
    0.009570102207362652,
)  # fmt: skip
_C0, _C1, _C2, _C3, _C4 = (tl.constexpr(c) for c in _COEFFICIENTS)
_LEAST = tl.constexpr(-125.0)
_ROUNDING = tl.constexpr(1.5 * 2**23)  # beside which a sum has no fraction
_ONE = tl.constexpr(0x3F800000)  # 1 in fp32, where integers are added to its exponent
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_PACK = 16
_SHARE = (2, 13)  # of the 16: both rows and both columns that a thread has of a product's tile


def _literal(value: float) -> str:
    return "0f" + struct.pack(">f", value).hex().upper()


def _assembly() -> str:
    """PTX of 16 powers of a thread."""
    least, rounding = _literal(_LEAST.value), _literal(_ROUNDING.value)
    *lower, highest = (_literal(c) for c in _COEFFICIENTS)
    lines = ["{ .reg .f32 x, t, f, p; .reg .b32 n;"]
    for i in range(_PACK):
        if i not in _SHARE:
            lines.append(f"ex2.approx.ftz.f32 ${i}, ${_PACK + i};")
            continue
        lines += [
            f"max.NaN.ftz.f32 x, ${_PACK + i}, {least};",
            f"add.rn.ftz.f32 t, x, {rounding};",
            f"sub.rn.ftz.f32 f, t, {rounding};",
            "sub.rn.ftz.f32 f, x, f;",
            f"mov.f32 p, {highest};",
            *(f"fma.rn.ftz.f32 p, p, f, {c};" for c in reversed(lower)),
            f"mov.b32 n, t; shl.b32 n, n, 23; add.s32 n, n, {_ONE.value}; mov.b32 t, n;",
            f"mul.rn.ftz.f32 ${i}, p, t;",
        ]
    return "\n".join([*lines, "}"])


_ASSEMBLY = tl.constexpr(_assembly())
_CONSTRAINTS = tl.constexpr(",".join(["=&f"] * _PACK + ["f"] * _PACK))


@triton.jit
def _polynomial(x):
    """The same steps, for the interpreter."""
    x = tl.maximum(x, _LEAST, propagate_nan=tl.PropagateNan.ALL)
    t = x + _ROUNDING
    f = x - (t - _ROUNDING)
    p = tl.full(x.shape, _C4, tl.float32)
    p = p * f + _C3
    p = p * f + _C2
    p = p * f + _C1
    p = p * f + _C0
    n = (t.to(tl.int32, bitcast=True) << 23) + _ONE
    return p * n.to(tl.float32, bitcast=True)


@triton.jit
def shared_exp2(x):
    """2^x of a tile in fp32, an eighth of it by the polynomial; all of it in the interpreter.

    For exponents that are not above 0, up to rounding: from 127 on, what comes out is anything.
    2^-125 is the least that the polynomial gives. NaN stays NaN.
    """
    if _INTERPRETED:
        result = _polynomial(x)
    else:
        result = tl.inline_asm_elementwise(
            _ASSEMBLY, _CONSTRAINTS, [x], dtype=tl.float32, is_pure=True, pack=16
        )
    return result
