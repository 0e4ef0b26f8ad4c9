"""Kernels against their twins on a CPU. A program: Triton interprets only if told at its import."""

from __future__ import annotations

import math
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from torch import Tensor

from raincheck_hf.kernels import (
    column_sums,
    greedy,
    greedy_coverage,
    greedy_determinant,
    greedy_max_min,
    greedy_thinning,
    similarity,
)
from raincheck_hf.models.vision import received_attention

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
    for weight, groups, ahead in (
        (None, 8, 8),
        (draw(k, n, tied=tied).abs().double(), 4, 2),
        (torch.zeros(n).double(), 1, 1),
    ):
        expected = greedy.coverage(matrix, k, weight)
        found = greedy_coverage.coverage(matrix, k, weight, groups=groups, ahead=ahead, chunk=32)
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
        assert torch.equal(found[1], expected[1])
    assert (greedy_determinant.determinant(torch.zeros(n, n), k)[0] == -1).all()
    # A diagonal far above its ceiling, or no number, is as if it were not there.
    matrix = torch.eye(n)
    matrix[0, 0], matrix[n // 2, n // 2] = 1e9, torch.nan
    for function in (greedy.determinant, greedy_determinant.determinant):
        picks = function(matrix, k, ceiling=1.0)[0]
        others = [i for i in range(n) if i not in (0, n // 2)]
        assert picks.tolist() == (others + k * [-1])[:k]


def check_thinning(r: int, n: int, k: int, tied: bool) -> None:
    rows = unit(n, n, 6, tied)
    for rounds in (1, 5):
        expected = greedy.thinned(rows @ rows.T, k, rounds)
        for mine, wide in ((16, 512), (2, 8)):
            found = greedy_thinning.thinned(rows @ rows.T, k, rounds, mine=mine, wide=wide)
            assert torch.equal(found, expected)
        some = torch.arange(0, n, 2)  # as if there were no others
        few = min(k, len(some))
        expected = some[greedy.thinned(rows[some] @ rows[some].T, few, rounds)]
        for function in (greedy.thinned, greedy_thinning.thinned):
            assert torch.equal(function(rows @ rows.T, few, rounds, some), expected)


def check_column_sums(r: int, n: int, k: int, tied: bool) -> None:
    lengths = [n, k, k]  # several blocks in a segment, parts of blocks, segments of one length
    width, dtype = (72, torch.float32) if tied else (5, torch.float16)  # bf16 is not interpreted
    query, key = draw(width, 2, sum(lengths), 2, width, tied=tied).to(dtype)
    found = column_sums.column_means(query, key, lengths, 0.3, rows=16, others=32)
    expected = received_attention(query, key, lengths, 0.3)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-8)

    # What is no number makes its segment none, and no other.
    for part in (query, key):
        spoilt = part.clone()
        spoilt[n + k // 2, -1, 0] = torch.nan
        pair = (spoilt, key) if part is query else (query, spoilt)
        found = column_sums.column_means(*pair, lengths, 0.3, rows=16, others=32)
        assert found.isnan().tolist() == [n <= i < n + k for i in range(n + 2 * k)]

    # Rows of a joint projection, with what attention already knew about them.
    joint = torch.stack([query, key, key], 1)
    parts = zip(query.float().split(lengths), key.float().split(lengths), strict=True)
    known = [torch.einsum("ihe,jhe->hij", a, b).mul(0.3).logsumexp(-1) for a, b in parts]
    normaliser = torch.cat(known, 1) / math.log(2)
    query, key = joint[:, 0], joint[:, 1]
    found = column_sums.column_means(
        query, key, lengths, 0.3, normaliser=normaliser, rows=32, others=16
    )
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-8)


def check_similarity(r: int, n: int, k: int, tied: bool) -> None:
    rows, factor = draw(n, n, 6, tied=tied), draw(k, n, tied=tied).abs() + 0.1
    product = rows @ rows.T
    expected = product * factor[:, None] * factor
    share = 0.5 * (expected.double() / 0.2).softmax(-1).float()
    found = similarity.softmax_products(product, factor, 0.2, 0.5, torch.empty(n, n))
    torch.testing.assert_close(found, share, rtol=2e-5, atol=1e-9)
    assert torch.equal(similarity.scale_products(product, factor), expected)


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
    for places in (1, 3):
        with pytest.raises(ValueError, match="places must be"):
            greedy_determinant.determinant(square, 1, places=places)
    with pytest.raises(ValueError, match="keep must be 1 to 2"):
        greedy_thinning.thinned(square, 3, 4, torch.arange(2))
    with pytest.raises(ValueError, match="tokens must be int64"):
        greedy_thinning.thinned(square, 1, 4, torch.ones(4))
    with pytest.raises(ValueError, match="weight must be fp64"):
        greedy_coverage.coverage(square, 1, torch.ones(4))
    heads = torch.rand(6, 2, 16)
    for query, key, lengths in [
        (heads, heads[1:], [6]), (heads, heads.half(), [6]), (heads.double(), heads.double(), [6]),
        (heads, heads, [5]), (heads, heads, [6, 0]), (heads[0], heads[0], [2]),
    ]:  # fmt: skip
        with pytest.raises(ValueError):
            column_sums.column_means(query, key, lengths, 1.0)
    with pytest.raises(ValueError, match="normaliser must be"):
        column_sums.column_means(heads, heads, [6], 1.0, normaliser=torch.ones(6, 2))
    with pytest.raises(ValueError, match="scale must be above 0"):
        column_sums.column_means(heads, heads, [6], 0.0)
    for product, factor in [
        (square, torch.ones(3)), (square.double(), torch.ones(4)), (square.T[:3], torch.ones(4)),
        (square.T, torch.ones(4)), (square, torch.ones(4).double()),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match="contiguous fp32"):
            similarity.scale_products(product, factor)


if __name__ == "__main__":
    name = sys.argv[1]
    if name == "bad_input":
        check_bad_input()
    else:
        for r, n, k in SHAPES:
            for tied in (False, True):
                globals()[f"check_{name}"](r, n, k, tied)
    print("agrees")
