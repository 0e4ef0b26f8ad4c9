"""Kernels of the vision tower against their twins, and those against float64, on a device.

A program: Triton interprets only if told at its import. ``python vision_kernels.py GROUP [cuda]``.
"""

from __future__ import annotations

import os
import sys

if "cuda" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from raincheck_hf.kernels import segments, vision_attention, vision_norm, vision_rope

torch.set_num_threads(1)
torch.backends.cuda.matmul.allow_tf32 = False
DEVICE = "cuda" if "cuda" in sys.argv else "cpu"
# The interpreter multiplies bf16 matrices by their bits and cuts bits off instead of rounding:
# products are tried in fp32 alone there, and fp16 stands in for the rest.
PRODUCTS = (torch.bfloat16,) if DEVICE == "cuda" else (torch.float32,)
DTYPES = (torch.float32, torch.bfloat16) if DEVICE == "cuda" else (torch.float32, torch.float16)
SMALL = vision_attention.Tiles(rows=64 if DEVICE == "cuda" else 16, keys=16, stages=2)
_NUMBER = 0


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    global _NUMBER
    _NUMBER += 1
    generator = torch.Generator().manual_seed(_NUMBER)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def unwritten(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
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


def attended(name: str, qkv: Tensor, lengths: list[int], tiles: vision_attention.Tiles) -> None:
    """The kernel, with and without normalisers, against the twin and float64."""
    scale = qkv.shape[-1] ** -0.5
    blocks = segments.block_table(lengths, tiles.rows, qkv.device)
    out = unwritten(len(qkv), qkv.shape[2] * qkv.shape[3], dtype=qkv.dtype)
    sums = unwritten(qkv.shape[2], len(qkv))
    assert vision_attention.attend(qkv, blocks, scale, out=out, tiles=tiles) is out
    again = vision_attention.attend(qkv, blocks, scale, normaliser=sums, tiles=tiles)
    assert torch.equal(out, again)
    twin, twin_sums = vision_attention.attend_plain(qkv, lengths, scale)
    exact, exact_sums = vision_attention.attend_plain(qkv.double(), lengths, scale)
    check(name, out, twin, exact)
    check(f"{name}, normalisers", sums, twin_sums, exact_sums)


def attention() -> None:
    """Segments longer and shorter than a block and than a tile, whole and not; odd widths."""
    for dtype in PRODUCTS:
        uneven = [5, 40, 1, 18]
        cases = [(lengths, 72) for lengths in ([16, 16, 48], [37], uneven)]
        for lengths, dim in cases + [(uneven, dim) for dim in (64, 16, 40, 88)]:
            qkv = draw(sum(lengths), 3, 2, dim, dtype=dtype)
            attended(f"attention {lengths} {dim}", qkv, lengths, SMALL)
        assert vision_attention.compiled_rightly(torch.device(DEVICE), dtype, 2, 72, SMALL)
        if DEVICE == "cuda":
            lengths = [4096, 300, 512, 512]
            qkv = draw(sum(lengths), 3, 16, 72, dtype=dtype)
            attended("whole", qkv, lengths, vision_attention.Tiles())


def attention_far() -> None:
    """Scores so far above a patch's own that a weight no longer fits, some rows of some heads."""
    for dtype in PRODUCTS:
        for own, other in ((-30.0, 30.0), (0.0, 40.0), (30.0, -30.0)):
            qkv = draw(45, 3, 2, 72, dtype=dtype)
            qkv[:, :2, 1] *= 0.1
            # Head 1: patch 3 looks at patch 40 and away from itself.
            qkv[3, 0, 1, 0] = 50.0
            qkv[3, 1, 1, 0], qkv[40, 1, 1, 0] = own, other
            scale = 72**-0.5
            q, k = qkv.double()[:, :2, 1].unbind(1)
            ahead = float((q[3] @ k.T * scale).max() - q[3] @ k[3] * scale)
            # 2^120 is where the kernel starts over: both sides of it are tried.
            assert (ahead * 1.4427 > 125) == (own < other)
            attended(f"far {own} {other}", qkv, [45], SMALL)


def attention_apart() -> None:
    """Segments do not see each other, were one of them not a number."""
    for dtype in PRODUCTS:
        qkv = draw(48, 3, 2, 72, dtype=dtype)
        blocks = segments.block_table([16, 32], SMALL.rows, qkv.device)
        alone = vision_attention.attend(qkv, blocks, 0.1, tiles=SMALL)
        qkv[16:] = float("nan")
        found = vision_attention.attend(qkv, blocks, 0.1, tiles=SMALL)
        assert torch.equal(found[:16], alone[:16]) and found[16:].isnan().all()


def norms() -> None:
    for dtype in DTYPES:
        for count, width in ((1, 72), (5, 64), (3, 1152)):
            for rows in (1, 2, 4):
                x, more = draw(count, width, dtype=dtype) + 3.0, draw(count, width, dtype=dtype)
                weight, bias = draw(width, dtype=dtype), draw(width, dtype=dtype)
                run = vision_norm.repeated_add_norm(x, rows=rows)
                for given in (torch.zeros_like(x), x):
                    summed, normed = run(given, more, weight, bias, 1e-6)
                twin_sum, twin = vision_norm.add_norm_plain(x, more, weight, bias, 1e-6)
                assert torch.equal(summed, twin_sum)
                wide = (twin_sum.double(), torch.zeros_like(x, dtype=torch.float64))
                exact = vision_norm.add_norm_plain(*wide, weight.double(), bias.double(), 1e-6)[1]
                check("add and norm", normed, twin, exact)


def rope() -> None:
    for dtype in DTYPES:
        for dim in (72, 18, 12):
            for block in (16, 512):
                qkv = draw(7, 3, 3, dim, dtype=dtype)
                cos, sin = draw(7, dim // 2), draw(7, dim // 2)
                wide = (qkv.double(), cos.double(), sin.double())
                twin = vision_rope.rotate_plain(qkv, cos, sin)
                vision_rope.rotation(qkv, cos, sin, block=block)(qkv)
                check("vision rope", qkv, twin, vision_rope.rotate_plain(*wide))
                assert torch.equal(qkv[:, 2], twin[:, 2])


def bad_input() -> None:
    qkv = draw(8, 3, 2, 16)
    blocks = segments.block_table([8], 16, torch.device(DEVICE))
    attend = vision_attention.attend
    add_norm = vision_norm.repeated_add_norm(draw(4, 8))
    x, w = draw(4, 8), draw(8)
    wrong = [
        lambda: attend(draw(8, 2, 2, 16), blocks, 1.0),
        lambda: attend(qkv.transpose(0, 2), blocks, 1.0),
        lambda: attend(draw(8, 3, 2, 20), blocks, 1.0),
        lambda: attend(qkv.half(), blocks, 1.0),
        lambda: attend(qkv, blocks.long(), 1.0),
        lambda: attend(qkv, blocks[0], 1.0),
        lambda: attend(qkv, blocks, 1.0, out=draw(8, 31)),
        lambda: attend(qkv, blocks, 1.0, normaliser=draw(8, 2)),
        lambda: vision_attention.repeated_attend(qkv, blocks, 1.0)(qkv, None, draw(2, 8)),
        lambda: vision_attention.repeated_attend(qkv, blocks, 1.0)(draw(9, 3, 2, 16)),
        lambda: vision_norm.repeated_add_norm(w),
        lambda: add_norm(x, draw(4, 7), w, w, 1e-6),
        lambda: add_norm(x, draw(8, 4).T, w, w, 1e-6),
        lambda: add_norm(x, x, w.half(), w, 1e-6),
        lambda: add_norm(x, x, w, draw(7), 1e-6),
    ]
    for number, call in enumerate(wrong):
        try:
            call()
        except ValueError:
            continue
        raise AssertionError(f"call {number} was not refused")


GROUPS = {
    "attention": attention,
    "attention_far": attention_far,
    "attention_apart": attention_apart,
    "norms": norms,
    "rope": rope,
    "bad_input": bad_input,
}

if __name__ == "__main__":
    GROUPS[sys.argv[1]]()
    print("agrees")
