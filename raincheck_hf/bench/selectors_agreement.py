"""Whether fast selectors do what plain ones do: by picks, and by the objective that they reach."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from raincheck_hf.kernels import greedy as plain
from raincheck_hf.selection import SelectionContext
from raincheck_hf.selection import greedy as fast
from raincheck_hf.selection.cdpruner import conditioned, relevance
from raincheck_hf.selection.mmtok import coverage_matrix
from raincheck_hf.selection.similarity import cosines

TOLERANCE = 1e-5
"""Largest relative difference between the objectives of a kernel and of its twin."""

SHAPES = (
    (1, 1, 1), (3, 5, 5), (70, 33, 12), (64, 128, 128), (300, 257, 100), (1030, 1000, 300),
    (1054, 1024, 308), (2100, 2049, 700), (4126, 4096, 1229),
)  # fmt: skip
"""Rows, tokens, picks."""


def covered(matrix: Tensor, picks: Tensor) -> float:
    """f(T) = Σ_r max(0, max_{j∈T} C_rj)."""
    return float(matrix[:, picks].amax(1).clamp_min(0).double().sum())


def separation(distance: Tensor, picks: Tensor) -> float:
    """The smallest distance between two picks."""
    chosen = distance[picks][:, picks].clone().fill_diagonal_(torch.inf)
    return float(chosen.min())


def log_determinant(matrix: Tensor, picks: Tensor) -> float:
    """log det L_T."""
    return float(torch.linalg.slogdet(matrix[picks][:, picks].double())[1])


OBJECTIVES: Mapping[str, Callable[[SelectionContext, Tensor], float]] = {
    "mmtok": lambda context, picks: covered(coverage_matrix(context), picks),
    "scope": lambda context, picks: covered(cosines(context.embeds), picks),
    "divprune": lambda context, picks: separation(1 - cosines(context.embeds), picks),
    "cdpruner": lambda context, picks: log_determinant(
        conditioned(cosines(context.embeds), relevance(context)), picks
    ),
}
"""What a method maximises, of the picks [k] of one input."""


def difference(found: float, expected: float) -> float:
    """|found − expected| over |expected|; 0 where they are the same."""
    return 0.0 if found == expected else abs(found - expected) / max(abs(expected), 1e-30)


def check_cores(device: str, largest: int = 4096) -> int:
    """Compare the cores that run on a device with the plain loops, at many sizes, with ties.

    All must take the same tokens.

    Returns:
        How many comparisons were made.

    Raises:
        RuntimeError: names the first that failed.
    """
    count = 0
    shapes = [shape for shape in SHAPES if shape[1] <= largest]
    for (r, n, k), tied in itertools.product(shapes, (False, True)):
        generator = torch.Generator(device).manual_seed(1000 * n + tied)
        covering = torch.rand(r, n, generator=generator, device=device) - 0.2
        weight = torch.rand(n, generator=generator, device=device).double()
        points = torch.randn(n, 2 * n // 3 + 2, generator=generator, device=device)
        if tied:
            covering, points = (covering * 4).round() / 4, points.round()
            weight = (weight * 2).round()
            points[n // 2 :] = points[: n - n // 2].clone()
        unit = F.normalize(points + 0.01, dim=-1)
        similar = unit @ unit.T
        for name, values in {"": None, "weighted ": weight}.items():
            found, rest = fast.coverage(covering, k, values)
            expected, twin_rest = plain.coverage(covering, k, values)
            _require(torch.equal(found, expected), f"{name}coverage picks", r, n, k, tied)
            _require(torch.equal(rest, twin_rest), f"{name}coverage gains", r, n, k, tied)
        found, rest = fast.max_min(1 - similar, k)
        expected, twin_rest = plain.max_min(1 - similar, k)
        _require(torch.equal(found, expected), "max-min picks", n, n, k, tied)
        _require(torch.equal(rest, twin_rest), "max-min distances", n, n, k, tied)
        keep = max(1, n // 4)
        some = torch.arange(n // 3, n, device=device)
        for tokens in (None, some):
            left = (cores.thinned(similar, keep, 32, tokens) for cores in (fast, plain))
            _require(torch.equal(*left), "tokens left by thinning", n, n, keep, tied)
        found, rest = fast.determinant(similar, k)
        expected, twin_rest = plain.determinant(similar, k)
        _require(torch.equal(found, expected), "determinant picks", n, n, k, tied)
        _require(torch.equal(rest, twin_rest), "determinant residuals", n, n, k, tied)
        count += 10
    return count


def _require(held: bool, what: str, r: int, n: int, k: int, tied: bool) -> None:
    if not held:
        raise RuntimeError(
            f"{what} differ from the plain loop's: {k} of {n} tokens, {r} rows, "
            f"{'with' if tied else 'without'} ties"
        )
