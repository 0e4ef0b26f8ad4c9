# mypy: disable-error-code="no-untyped-def"
# An annotation in a jitted function speaks to Triton.
"""silu(gate) * up in one pass over memory, for the many rows of a prefill. Twin: `*_plain`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu

from raincheck_hf.kernels.launch import Repeated

_BLOCK = 1024


@triton.jit
def _silu_mul(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (g / (1.0 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=inside)


def silu_mul_plain(gate: Tensor, up: Tensor) -> Tensor:
    """Twin of `silu_mul`."""
    return silu(gate) * up


def silu_mul(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """Write silu(gate) * up to ``out``; all of one shape and dtype, contiguous; out may be gate.

    Raises:
        ValueError: A shape, dtype or layout is not as above.
    """
    repeated_silu_mul(gate, up, out)(gate, up, out)


def repeated_silu_mul(gate: Tensor, up: Tensor, out: Tensor) -> Callable[..., None]:
    """`silu_mul` for many tensors like these: checked and looked up once."""
    for other in (up, out):
        if other.shape != gate.shape or other.dtype != gate.dtype:
            raise ValueError(f"want {list(gate.shape)} {gate.dtype}; got {list(other.shape)}")
    if not (gate.is_contiguous() and up.is_contiguous() and out.is_contiguous()):
        raise ValueError("gate, up and out must be contiguous")
    count = gate.numel()
    launch = Repeated(_silu_mul, (triton.cdiv(count, _BLOCK),), {"BLOCK": _BLOCK})

    def run(gate: Tensor, up: Tensor, out: Tensor) -> None:
        with torch.cuda.device_of(gate):
            launch(gate, up, out, count)

    return run
