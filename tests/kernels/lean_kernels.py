"""Kernels of the lean forward against their twins, and those against float64, on a device.

A program: Triton interprets only if told at its import. ``python lean_kernels.py GROUP [cuda]``.
"""

from __future__ import annotations

import os
import sys

if "cuda" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from raincheck_hf.kernels import descriptor as d
from raincheck_hf.kernels import linear as lin
from raincheck_hf.kernels import norm, pointwise, rows, vision_rope

torch.set_num_threads(1)
torch.backends.cuda.matmul.allow_tf32 = False
DEVICE = "cuda" if "cuda" in sys.argv else "cpu"
# The interpreter multiplies bf16 matrices by their bits; fp16 stands in for both there.
DTYPES = (torch.float32, torch.bfloat16) if DEVICE == "cuda" else (torch.float32, torch.float16)
ROWS = (1, 3, 7, 31, 33, 63)
_NUMBER = 0


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    global _NUMBER
    _NUMBER += 1
    generator = torch.Generator().manual_seed(_NUMBER)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def unwritten(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def off(found: Tensor, exact: Tensor) -> float:
    """RMS of the error over RMS of the result; NaN does not pass."""
    error = (found.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    return float(error)


def check(name: str, found: Tensor, twin: Tensor, exact: Tensor) -> None:
    """O8: the twin equals float64, and the kernel is as near to float64 as the twin."""
    own = off(twin, exact)
    bound = 1e-5 if found.dtype == torch.float32 else max(2 * own, 1e-4)
    assert own < (1e-5 if found.dtype == torch.float32 else 2e-2), (name, own)
    assert off(found, exact) <= bound, (name, found.dtype, off(found, exact), own)


def linears(count: int) -> None:
    """Grouped weights whose rows are no multiple of a block, K split and not."""
    scratch = lin.Scratch(torch.device(DEVICE))
    for dtype in DTYPES:
        for width in (96, 1024):
            x, residual = draw(count, width, dtype=dtype), draw(count, 83, dtype=dtype)
            weights = [draw(n, width, dtype=dtype) / width**0.5 for n in (40, 16, 24, 3)]
            gamma = lin.Norm(draw(width, dtype=dtype), 1, 1e-6)
            one = gamma if count == 1 else None
            for before in {None, one}:
                out = unwritten(count, 83, dtype=dtype)
                lin.linear(x, weights, out, scratch, norm=before, residual=residual)
                wide = (x.double(), [w.double() for w in weights])
                exact = lin.linear_plain(*wide, _double(before), residual.double())
                check("linear", out, lin.linear_plain(x, weights, before, residual), exact)
                assert not scratch.arrived.any()
                gate, up = weights[0], draw(40, width, dtype=dtype) / width**0.5
                out = unwritten(count, 40, dtype=dtype)
                lin.swiglu(x, gate, up, out, scratch, norm=before)
                wide = (x.double(), gate.double(), up.double())
                exact = lin.swiglu_plain(*wide, _double(before))
                check("swiglu", out, lin.swiglu_plain(x, gate, up, before), exact)


def _double(before: lin.Norm | None) -> lin.Norm | None:
    return None if before is None else lin.Norm(before.weight.double(), before.offset, before.eps)


def norms() -> None:
    for dtype in DTYPES:
        for count in (1, 3, 33, 75):
            x = draw(count, 2 * 72, dtype=dtype)[:, :72]  # rows with a gap between them
            weight = draw(72, dtype=dtype)
            for offset in (0, 1):
                out = unwritten(count, 72, dtype=dtype)
                wide = (weight.double(), offset, 1e-6)
                norm.rms_norm(x, weight, offset, 1e-6, out)
                twin = norm.rms_norm_plain(x, weight, offset, 1e-6)
                check("norm", out, twin, norm.rms_norm_plain(x.double(), *wide))
                again = unwritten(count, 72, dtype=dtype)
                run = norm.repeated_rms_norm(again, offset, 1e-6)
                for given in (torch.zeros_like(out), x.contiguous()):
                    run(given, weight)
                assert torch.equal(again, out)
            gate, weight = draw(count, 72, dtype=dtype), draw(24, dtype=dtype)
            out = unwritten(count, 72, dtype=dtype)
            norm.gated_rms_norm(x, weight, gate, 1e-6, out)
            exact = norm.gated_rms_norm_plain(x.double(), weight.double(), gate.double(), 1e-6)
            check("gated", out, norm.gated_rms_norm_plain(x, weight, gate, 1e-6), exact)


def pointwise_() -> None:
    for dtype in DTYPES:
        for count in (1, 31, 75):
            gate, up = draw(count, 40, dtype=dtype), draw(count, 40, dtype=dtype)
            exact = pointwise.silu_mul_plain(gate.double(), up.double())
            twin, out = pointwise.silu_mul_plain(gate, up), unwritten(count, 40, dtype=dtype)
            pointwise.silu_mul(gate, up, out)
            check("silu_mul", out, twin, exact)
            qkv = draw(count, 3, 3, 18, dtype=dtype)
            cos, sin = draw(count, 9), draw(count, 9)
            wide = (qkv.double(), cos.double(), sin.double())
            twin, exact = vision_rope.rotate_plain(qkv, cos, sin), vision_rope.rotate_plain(*wide)
            assert torch.equal(twin[:, 2], qkv[:, 2])
            vision_rope.rotation(qkv, cos, sin)(qkv)
            check("vision rope", qkv, twin, exact)


def gathers() -> None:
    capacity, width, layers = 7, 40, 2
    for dtype in DTYPES:
        for chunk, token in ((5, True), (7, False), (0, True), (0, False), (7, True)):
            table = draw(11, width, dtype=dtype)
            blocks = [draw(4, width, dtype=dtype), draw(9, width, dtype=dtype)]
            places = [torch.randint(0, 99, (3, 4 + 5 * i), device=DEVICE) for i in (0, 1)]
            deep = [
                [draw(len(block), width, dtype=dtype) for block in blocks] for _ in range(layers)
            ]
            ids = torch.tensor([6], device=DEVICE)
            header = torch.zeros(d.HEADER.value, dtype=torch.int64)
            header[d.CHUNK.value], header[d.TOKEN.value] = chunk, int(token)
            header[d.TOKEN_ID.value] = ids.data_ptr()
            header[d.POSITION.value : d.POSITION.value + 3] = torch.tensor([50, 51, 52])
            lines = torch.zeros(capacity, 3 + layers, dtype=torch.int64)
            wanted, where, features = [], [], []
            for row in range(chunk):
                block, at = (0, row + 1) if row < 3 else (1, row - 3)
                lines[row, 0] = blocks[block][at].data_ptr()
                lines[row, 1] = places[block][:, at].data_ptr()
                lines[row, 2] = places[block].stride(0)
                for layer in range(layers):
                    lines[row, 3 + layer] = deep[layer][block][at].data_ptr()
                wanted.append(blocks[block][at])
                where.append(places[block][:, at])
                features.append(deep[1][block][at])
            if token:
                wanted.append(table[6])
                where.append(torch.tensor([50, 51, 52], device=DEVICE))
            x = unwritten(capacity + 1, width, dtype=dtype)
            positions = torch.full((3, capacity + 1), -1, dtype=torch.int64, device=DEVICE)
            header, lines = header.to(DEVICE), lines.to(DEVICE)
            rows.gather(header, lines, table, x, positions)
            if wanted:
                twin = rows.gather_plain(wanted, where, ids if token else None, capacity)
                assert torch.equal(x, twin[0]) and torch.equal(positions, twin[1])
            else:
                assert not x.any() and not positions.any()
            before = x.clone()
            rows.add_deepstack(header, lines, 1, x)
            for row in range(chunk):
                before[row] += features[row]
            assert torch.equal(x, before)


def bad_input() -> None:
    scratch = lin.Scratch(torch.device(DEVICE))
    x, weight, out = draw(2, 32), draw(8, 32), draw(2, 8)
    wrong = [
        lambda: lin.linear(draw(65, 32), [weight], draw(65, 8), scratch),
        lambda: lin.linear(x, [weight] * 5, draw(2, 40), scratch),
        lambda: lin.linear(x, [weight.T], out, scratch),
        lambda: lin.linear(x, [weight.half()], out, scratch),
        lambda: lin.linear(x, [weight], out, scratch, norm=lin.Norm(draw(32), 0, 1e-6)),
        lambda: lin.linear(x, [weight], out, scratch, residual=draw(2, 7)),
        lambda: lin.swiglu(x, weight, draw(9, 32), out, scratch),
        lambda: norm.rms_norm(x, draw(31), 0, 1e-6, draw(2, 32)),
        lambda: norm.gated_rms_norm(x, draw(32), draw(2, 31), 1e-6, draw(2, 32)),
        lambda: pointwise.silu_mul(x, draw(2, 31), draw(2, 32)),
        lambda: pointwise.silu_mul(x.T, draw(32, 2), draw(32, 2)),
        lambda: vision_rope.rotation(draw(2, 2, 1, 4), draw(2, 2), draw(2, 2)),
        lambda: vision_rope.rotation(draw(2, 3, 1, 4), draw(2, 3), draw(2, 3)),
    ]
    for number, call in enumerate(wrong):
        try:
            call()
        except ValueError:
            continue
        raise AssertionError(f"call {number} was not refused")


GROUPS = {
    **{f"linear_{count}": (lambda count=count: linears(count)) for count in ROWS},
    "norms": norms,
    "pointwise": pointwise_,
    "gathers": gathers,
    "bad_input": bad_input,
}

if __name__ == "__main__":
    GROUPS[sys.argv[1]]()
    print("agrees")
