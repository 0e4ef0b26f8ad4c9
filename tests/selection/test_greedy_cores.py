"""Published properties of the greedy cores, and their behaviour on ties and at the edges."""

from __future__ import annotations

import itertools

import pytest
import torch
from selection_inputs import make_context
from torch import Tensor

from raincheck_hf.selection.cdpruner import conditioned, relevance
from raincheck_hf.selection.greedy import coverage, determinant, max_min, ranked
from raincheck_hf.selection.mmtok import coverage_matrix
from raincheck_hf.selection.similarity import cosines


def covered(matrix: Tensor, chosen: list[int]) -> float:
    return float(matrix[:, chosen].amax(1).clamp_min(0).double().sum()) if chosen else 0.0


def test_coverage_is_monotone_and_submodular_and_its_gains_shrink() -> None:
    matrix = coverage_matrix(make_context("mixed"))
    picks, rest = coverage(matrix, 30)
    order = picks.tolist()
    values = [covered(matrix, order[:k]) for k in range(31)]
    gains = [b - a for a, b in itertools.pairwise(values)]
    assert all(gain > 0 for gain in gains)
    assert all(a >= b for a, b in itertools.pairwise(gains))
    for j in range(0, 80, 7):
        by_prefix = [
            covered(matrix, [*order[:k], j]) - covered(matrix, order[:k]) for k in (0, 1, 5, 15, 30)
        ]
        assert all(a >= b - 1e-12 for a, b in itertools.pairwise(by_prefix))
        if j not in order:
            assert by_prefix[-1] == pytest.approx(float(rest[j]), rel=1e-6, abs=1e-12)


def test_coverage_greedy_is_near_the_optimum() -> None:
    matrix = torch.rand(9, 9, generator=torch.Generator().manual_seed(4))
    best = max(covered(matrix, list(chosen)) for chosen in itertools.combinations(range(9), 3))
    found = covered(matrix, coverage(matrix, 3)[0].tolist())
    assert (1 - 1 / 2.718281828) * best <= found <= best


def test_coverage_updates_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = coverage_matrix(make_context("mixed"))
    expected = coverage(matrix, 30)
    monkeypatch.setattr("raincheck_hf.kernels.greedy._ROWS_AT_ONCE", 3)
    found = coverage(matrix, 30)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])


def test_coverage_of_duplicates_goes_by_index() -> None:
    matrix = torch.rand(7, 5, generator=torch.Generator().manual_seed(0)).repeat(1, 4)
    picks, rest = coverage(matrix, 20)
    first = picks[:5].tolist()
    assert sorted(first) == list(range(5))
    assert picks[5:].tolist() == list(range(5, 20))
    assert torch.equal(rest, torch.zeros(20, dtype=torch.float64))


def test_coverage_rounding_does_not_break_ties() -> None:
    # The weak columns are covered entirely by the strong ones, bit by bit: what is left is zero.
    generator = torch.Generator().manual_seed(0)
    # Wide exponents, as a sharp softmax has; sums of like exponents are exact in fp64.
    strong = torch.exp(6 * torch.randn(300, 6, generator=generator))
    weak = 1e-3 * torch.rand(300, 10, generator=generator) * strong.amax(1, keepdim=True)
    picks, rest = coverage(torch.cat([weak, strong], dim=1), 16)
    assert sorted(picks[:6].tolist()) == list(range(10, 16))
    assert picks[6:].tolist() == list(range(10))
    assert torch.equal(rest, torch.zeros(16, dtype=torch.float64))


def test_determinant_picks_match_determinant_ratios() -> None:
    context = make_context("image")
    matrix = conditioned(cosines(context.embeds), relevance(context))
    picks, residual = determinant(matrix, 12)
    order, exact = picks.tolist(), matrix.double()

    def det(chosen: list[int]) -> float:
        return float(torch.linalg.det(exact[chosen][:, chosen]))

    for step, pick in enumerate(order):
        ratios = {
            j: det([*order[:step], j]) / det(order[:step])
            for j in range(35)
            if j not in order[:step]
        }
        assert ratios[pick] == max(ratios.values())
    for j in set(range(35)) - set(order):
        assert det([*order, j]) / det(order) == pytest.approx(float(residual[j]), rel=1e-3)


def test_determinant_stops_at_the_rank() -> None:
    rows = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    picks, _ = determinant(rows @ rows.T, 15)
    assert len(set(picks[:6].tolist())) == 6
    assert picks[:6].min() >= 0
    assert picks[6:].tolist() == 9 * [-1]
    assert determinant(torch.zeros(4, 4), 2)[0].tolist() == [-1, -1]


def test_max_min_radius_shrinks_and_is_what_is_returned() -> None:
    unit = make_context("mixed").unit_embeds
    distance = 1 - unit @ unit.T
    picks, nearest = max_min(distance, 40)
    order = picks.tolist()
    radii = [float(distance[order[:k]].amin(0).max()) for k in range(1, 41)]
    assert all(a >= b for a, b in itertools.pairwise(radii))
    for k in range(1, 40):
        assert float(distance[order[k], order[:k]].min()) == pytest.approx(radii[k - 1])
    torch.testing.assert_close(nearest, distance[order].amin(0))


def test_max_min_separation_is_within_a_factor_of_two() -> None:
    # Gonzalez: greedy max-min is a 2-approximation for a metric, from any start.
    points = torch.rand(9, 2, generator=torch.Generator().manual_seed(1))
    distance = torch.cdist(points, points)

    def separation(chosen: tuple[int, ...]) -> float:
        return min(float(distance[i, j]) for i, j in itertools.combinations(chosen, 2))

    best = max(separation(chosen) for chosen in itertools.combinations(range(9), 4))
    found = separation(tuple(max_min(distance, 4)[0].tolist()))
    assert best / 2 <= found <= best


@pytest.mark.parametrize("core", [coverage, max_min, determinant])
def test_one_token_and_everything(core) -> None:
    assert core(torch.ones(1, 1), 1)[0].tolist() == [0]
    unit = make_context("image").unit_embeds
    similar = unit @ unit.T
    matrix = 1 - similar if core is max_min else similar
    picks = core(matrix, 35)[0].tolist()
    assert sorted(picks) == list(range(35))
    for k in (1, 7):
        assert core(matrix, k)[0].tolist() == picks[:k]


def test_ranked() -> None:
    rest = torch.tensor([5.0, 9.0, 1.0, 7.0])
    scores = ranked(torch.tensor([2, 0]), rest)
    assert scores.tolist() == [1.0, 0.0, 2.0, -2.0]
    assert scores.dtype == torch.float32
    assert ranked(torch.tensor([2, -1, -1]), rest).tolist() == [-4.0, 0.0, 3.0, -2.0]
