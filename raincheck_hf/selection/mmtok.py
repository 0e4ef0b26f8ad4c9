"""MMTok (arXiv 2508.18264): cover the question and the picture at once."""

from __future__ import annotations

import torch
from torch import Tensor

from raincheck_hf.selection.context import SelectionContext
from raincheck_hf.selection.greedy import coverage, ranked
from raincheck_hf.selection.registry import register_selector
from raincheck_hf.selection.similarity import cosines_between, softmax_cosines

ALPHA = 0.5
TEXT_TEMPERATURE = 0.01
VISION_TEMPERATURE = 0.2


def coverage_matrix(context: SelectionContext) -> Tensor:
    """C = [softmax(Z Xᵀ/τ_t)/m ; α·softmax(F Fᵀ/τ_v)/n] on unit rows, fp32 [m + n, n].

    Without a query (m = 0) only the vision rows remain.
    """
    query, n = context.query, context.n
    m = len(query)
    matrix = torch.empty(m + n, n, device=context.device)
    softmax_cosines(context.features, VISION_TEMPERATURE, ALPHA / n, matrix[m:])
    if m > 0:
        text = cosines_between(query, context.embeds) / TEXT_TEMPERATURE
        matrix[:m] = torch.softmax(text, dim=-1) / m
    return matrix


@register_selector("mmtok")
def mmtok(context: SelectionContext) -> Tensor:
    """Greedy maximum of f(T) = Σ_rows max_{j∈T} C; the rest by the gain that it would still bring.

    Needs `features` and uses `query`. One fp32 matrix of [m + n, n], two on a GPU.
    """
    # Each row of C sums to 1/m or α/n, so that no column sums to more than 1 + α.
    return ranked(*coverage(coverage_matrix(context), context.budget, ceiling=1 + ALPHA))
