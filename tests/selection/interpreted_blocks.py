"""Grids of several blocks against the plain loops on a CPU, a process a block. A program.

Triton interprets blocks one after the other, which those that wait for each other do not survive.
Here each is interpreted by a process of its own; what the wrappers allocate is shared memory.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from triton.runtime import interpreter

from raincheck_hf.kernels import greedy, greedy_coverage, greedy_determinant, greedy_thinning

torch.set_num_threads(1)
BLOCKS = 4
LIMIT = 100
"""Seconds that a launch may take."""


def shared(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: allocate(*args, **kwargs).share_memory_()


def interpret_in_processes() -> None:
    """Replace the interpreter's loop over blocks."""
    one_after_the_other = interpreter.GridExecutor.__call__
    builder = interpreter.interpreter_builder

    def one(launch: Any, block: int, *args: Any, **kwargs: Any) -> NoReturn:
        signal.alarm(LIMIT)  # a block that waits for ever would outlive the test
        status = 1
        try:
            launch.grid = (1,)
            builder.set_grid_idx = lambda *_: setattr(builder, "grid_idx", (block, 0, 0))
            launch._restore_args_dev = lambda *_: None  # arguments are where they were
            one_after_the_other(launch, *args, **kwargs)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def all_at_once(launch: Any, *args: Any, **kwargs: Any) -> None:
        children = set()
        for block in range(launch.grid[0]):
            child = os.fork()
            if child == 0:
                one(launch, block, *args, **kwargs)
            children.add(child)
        while children:
            child, status = os.wait()
            children.remove(child)
            if status:
                for other in children:
                    os.kill(other, signal.SIGKILL)
                raise RuntimeError(f"a block ended with status {status}")

    interpreter.GridExecutor.__call__ = all_at_once
    for name in ("empty", "zeros", "full"):
        setattr(torch, name, shared(getattr(torch, name)))


def check_coverage(matrix: Tensor, k: int, weight: Tensor | None, groups: int, ahead: int) -> None:
    expected = greedy.coverage(matrix, k, weight)
    found = greedy_coverage.coverage(
        matrix, k, weight, blocks=BLOCKS, groups=groups, ahead=ahead, chunk=32
    )
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def check_determinant(matrix: Tensor, k: int, places: int) -> None:
    expected = greedy.determinant(matrix, k)
    found = greedy_determinant.determinant(matrix, k, blocks=BLOCKS, places=places, depth=16)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def check_thinning(rows: Tensor, keep: int) -> None:
    expected = greedy.thinned(rows @ rows.T, keep, 4)
    on_a_gpu = greedy_thinning.grid_size
    greedy_thinning.grid_size = lambda *_: BLOCKS
    try:
        found = greedy_thinning.thinned(rows @ rows.T, keep, 4, mine=2, wide=8)
    finally:
        greedy_thinning.grid_size = on_a_gpu
    assert torch.equal(found, expected)


if __name__ == "__main__":
    interpret_in_processes()
    generator = torch.Generator().manual_seed(0)
    loose = torch.rand(37, 29, generator=generator)  # whatever two picks cover, they share
    apart = torch.block_diag(*torch.rand(7, 5, 4, generator=generator))  # seven that share nothing
    apart = apart[:, torch.randperm(28, generator=generator)].contiguous()
    check_coverage(loose, 12, loose[0].double(), groups=1, ahead=4)
    check_coverage(apart, 20, None, groups=2, ahead=8)
    check_coverage((4 * loose).round() / 4, 29, None, groups=1, ahead=1)
    narrow = torch.randn(29, 6, generator=generator)
    for rows in (narrow, torch.eye(12), torch.cat([narrow, narrow])):
        check_determinant(rows @ rows.T, 12, places=4)
    wide = torch.randn(100, 150, generator=generator)
    # Products of matrices are not quite symmetric; and more words than a pool holds.
    skew = 1e-4 * torch.randn(100, 100, generator=generator).triu(1)
    check_determinant(wide @ wide.T / 150 + skew, 70, places=16)
    check_thinning(narrow, 7)
    print("agrees")
