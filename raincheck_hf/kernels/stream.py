# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""Weight-streaming matmul for 1 to 64 rows: what a linear layer costs is reading its weights once.

    y = norm(x) [W_0; W_1; ...]^T (+ residual), or silu(norm(x) W_0^T) * (norm(x) W_1^T)

Several weights share one launch without being copied together: a program picks the one that its
block of output columns belongs to. See STREAM.md for the derivation. Twins: `linear.linear` and
`linear.swiglu`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows_of(weights, n, K: tl.constexpr, k):
    return weights + n[:, None].to(tl.int64) * K + k[None, :]


@triton.jit
def _row(
    x, gamma, residual, out,
    w0, w1, w2, w3, n0, n1, n2, n3,
    eps, OFFSET: tl.constexpr, K: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row. Products are added up elementwise in fp32 and reduced once at the end.

    Args:
        x: [K].
        gamma: [K], norm weight; read where NORM.
        residual: [N]; read where RESIDUAL.
        out: [N], written.
        w0, w1, w2, w3: [n_i, K] each.
    """
    block = tl.program_id(0)
    w, count, column = w0, n0, 0
    if not SWIGLU:
        b0, b1, b2 = tl.cdiv(n0, BN), tl.cdiv(n1, BN), tl.cdiv(n2, BN)
        if block >= b0 + b1 + b2:
            w, count, column, block = w3, n3, n0 + n1 + n2, block - b0 - b1 - b2
        elif block >= b0 + b1:
            w, count, column, block = w2, n2, n0 + n1, block - b0 - b1
        elif block >= b0:
            w, count, column, block = w1, n1, n0, block - b0
    n = block * BN + tl.arange(0, BN)
    inside = n < count
    acc = tl.zeros([BN, BK], tl.float32)
    acc2 = tl.zeros([BN, BK], tl.float32)
    square = tl.zeros([BK], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        k = k0 + tl.arange(0, BK)
        whole = inside[:, None] & (k < K)[None, :]
        a = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        weight = tl.load(_rows_of(w, n, K, k), mask=whole, other=0.0)
        if SWIGLU:
            weight2 = tl.load(_rows_of(w1, n, K, k), mask=whole, other=0.0)
        if NORM:
            square += a * a
            a *= tl.load(gamma + k, mask=k < K, other=0.0).to(tl.float32) + OFFSET
        acc += weight.to(tl.float32) * a[None, :]
        if SWIGLU:
            acc2 += weight2.to(tl.float32) * a[None, :]
    y = tl.sum(acc, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(square) / K + eps)
        y *= scale
    if SWIGLU:
        up = tl.sum(acc2, 1)
        if NORM:
            up *= scale
        y = y / (1.0 + tl.exp(-y)) * up
    if RESIDUAL:
        y += tl.load(residual + column + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + column + n, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rows(
    x, x_stride, gamma, residual, out, out_stride, partial, arrived,
    w0, w1, w2, w3, n0, n1, n2, n3, rows,
    eps, OFFSET: tl.constexpr, K: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, SWIGLU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Up to BM rows, by tensor cores. K may be split; the last program to arrive adds up.

    Args:
        x: [rows, K].
        residual, out: [rows, N].
        partial: fp32 scratch, [blocks, SPLIT, 2 with SWIGLU else 1, BN, BM]; for NORM [.., BM] more
            behind it.
        arrived: int32 [blocks], zero; zero again afterwards.
    """
    block = tl.program_id(0)
    part = tl.program_id(1)
    tile = block
    w, count, column = w0, n0, 0
    if not SWIGLU:
        b0, b1, b2 = tl.cdiv(n0, BN), tl.cdiv(n1, BN), tl.cdiv(n2, BN)
        if block >= b0 + b1 + b2:
            w, count, column, block = w3, n3, n0 + n1 + n2, block - b0 - b1 - b2
        elif block >= b0 + b1:
            w, count, column, block = w2, n2, n0 + n1, block - b0 - b1
        elif block >= b0:
            w, count, column, block = w1, n1, n0, block - b0
    n = block * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    inside = n < count
    live = m < rows
    acc = tl.zeros([BN, BM], tl.float32)
    acc2 = tl.zeros([BN, BM], tl.float32)
    square = tl.zeros([BM], tl.float32)
    share: tl.constexpr = (K // BK + SPLIT - 1) // SPLIT * BK if K % BK == 0 else K
    start = part * share
    for k0 in tl.range(start, tl.minimum(start + share, K), BK, num_stages=STAGES):
        k = k0 + tl.arange(0, BK)
        weight = tl.load(_rows_of(w, n, K, k), mask=inside[:, None] & (k < K)[None, :], other=0.0)
        if SWIGLU:
            weight2 = tl.load(
                _rows_of(w1, n, K, k), mask=inside[:, None] & (k < K)[None, :], other=0.0
            )
        at = x + m[None, :] * x_stride + k[:, None]
        a = tl.load(at, mask=live[None, :] & (k < K)[:, None], other=0.0)
        if NORM:
            wide = a.to(tl.float32)
            square += tl.sum(wide * wide, 0)
            g = tl.load(gamma + k, mask=k < K, other=0.0).to(tl.float32) + OFFSET
            a = (wide * g[:, None]).to(a.dtype)
        acc = tl.dot(weight, a, acc, input_precision=PRECISION)
        if SWIGLU:
            acc2 = tl.dot(weight2, a, acc2, input_precision=PRECISION)
    if SPLIT > 1:
        here = tl.arange(0, BN)[:, None] * BM + m[None, :]
        SIZE: tl.constexpr = BN * BM * (2 if SWIGLU else 1) + BM
        base = partial + tile.to(tl.int64) * SPLIT * SIZE
        mine = base + part * SIZE
        tl.store(mine + here, acc)
        if SWIGLU:
            tl.store(mine + BN * BM + here, acc2)
        if NORM:
            tl.store(mine + (SIZE - BM) + m, square)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tile, 1, sem="acq_rel")
        if before != SPLIT - 1:
            return
        tl.store(arrived + tile, 0)
        tl.debug_barrier()
        acc = tl.zeros([BN, BM], tl.float32)
        acc2 = tl.zeros([BN, BM], tl.float32)
        square = tl.zeros([BM], tl.float32)
        for other in range(SPLIT):  # in a fixed order, whoever came last
            theirs = base + other * SIZE
            acc += tl.load(theirs + here, cache_modifier=".cg")
            if SWIGLU:
                acc2 += tl.load(theirs + BN * BM + here, cache_modifier=".cg")
            if NORM:
                square += tl.load(theirs + (SIZE - BM) + m, cache_modifier=".cg")
    y = acc
    if NORM:
        scale = tl.rsqrt(square / K + eps)[None, :]
        y *= scale
        acc2 *= scale
    if SWIGLU:
        y = y / (1.0 + tl.exp(-y)) * acc2
    at = (column + n)[:, None] + m[None, :] * out_stride
    keep = inside[:, None] & live[None, :]
    if RESIDUAL:
        y += tl.load(residual + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=keep)
