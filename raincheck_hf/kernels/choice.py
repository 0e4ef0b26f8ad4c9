"""Whether a kernel runs, or its plain twin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor

_loops_only: ContextVar[bool] = ContextVar("loops_only", default=False)


@contextmanager
def plain_loops() -> Iterator[None]:
    """Run the plain loops on a GPU, too, to compare with or to rule the kernels out.

    Matrices of similarity are made as ever, so that both choose by the same numbers.
    """
    token = _loops_only.set(True)
    try:
        yield
    finally:
        _loops_only.reset(token)


@cache
def fused() -> bool:
    """Whether this installation can run the kernels, given a GPU."""
    if torch.version.cuda is None:
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def by_kernel(tensor: Tensor) -> bool:
    """Whether a kernel should work on this tensor, and not its plain loop."""
    return tensor.is_cuda and tensor.numel() > 0 and not _loops_only.get() and fused()
