"""Kernels against their twins on a CPU. A program: Triton interprets only if told at its import."""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from torch import Tensor

from raincheck_hf.kernels import (
    greedy,
    greedy_coverage,
    greedy_determinant,
    greedy_max_min,
    greedy_thinning,
)

torch.set_num_threads(1)
# Rows, tokens, picks; neither powers of two nor of a warp.
SHAPES = [(1, 1, 1), (5, 7, 7), (35, 13, 6), (19, 33, 12), (40, 45, 36)]


def draw(seed: int, *shape: int, tied: bool) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (2 * values).round() / 2 if tied else values


def unit(seed: int, n: int, width: int, tied: bool) -> Tensor:
    return torch.nn.functional.normalize(draw(seed, n, width, tied=tied) + 0.01, dim=-1)


def check_coverage(r: int, n: int, k: int, tied: bool) -> None:
    matrix = draw(n, r, n, tied=tied)
    for weight in (None, draw(k, n, tied=tied).abs().double(), torch.zeros(n).double()):
        expected = greedy.coverage(matrix, k, weight)
        found = greedy_coverage.coverage(matrix, k, weight, chunk=16)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
    matrix[r // 2, n // 2] = torch.nan
    rest = greedy_coverage.coverage(matrix, 1)[1]
    assert torch.equal(rest.isnan(), greedy.coverage(matrix, 1)[1].isnan())
    assert rest.isnan().nonzero().tolist() == [[n // 2]]


def check_max_min(r: int, n: int, k: int, tied: bool) -> None:
    rows = unit(n, n, 6, tied)
    distance = 1 - rows @ rows.T
    expected, found = greedy.max_min(distance, k), greedy_max_min.max_min(distance, k)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def check_determinant(r: int, n: int, k: int, tied: bool) -> None:
    for width in (4, 60):  # with too small a rank, and with enough
        rows = unit(n, n, width, tied)
        expected = greedy.determinant(rows @ rows.T, k)
        found = greedy_determinant.determinant(rows @ rows.T, k, depth=16)
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-5)
    assert len(greedy_determinant.determinant(torch.zeros(n, n), k)[0]) == 0


def check_thinning(r: int, n: int, k: int, tied: bool) -> None:
    rows = unit(n, n, 6, tied)
    for rounds in (1, 5):
        expected = greedy.thinned(rows @ rows.T, k, rounds)
        assert torch.equal(greedy_thinning.thinned(rows @ rows.T, k, rounds), expected)


def check_bad_input() -> None:
    square = torch.rand(4, 4)
    for core in (
        lambda x, k: greedy_coverage.coverage(x, k),
        greedy_max_min.max_min,
        greedy_determinant.determinant,
        lambda x, k: greedy_thinning.thinned(x, k, 4),
    ):
        for matrix, k in [
            (square.double(), 1), (square[0], 1), (square.T[:, :3], 1), (square, 0), (square, 5),
        ]:  # fmt: skip
            with pytest.raises(ValueError):
                core(matrix, k)
    with pytest.raises(ValueError, match="weight must be fp64"):
        greedy_coverage.coverage(square, 1, torch.ones(4))


if __name__ == "__main__":
    name = sys.argv[1]
    if name == "bad_input":
        check_bad_input()
    else:
        for r, n, k in SHAPES:
            for tied in (False, True):
                globals()[f"check_{name}"](r, n, k, tied)
    print("agrees")
