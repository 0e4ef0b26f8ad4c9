"""MMTok (arXiv 2508.18264): cover the question and the picture at once."""

from __future__ import annotations

import torch
from torch import Tensor

from raincheck_hf.selection.context import SelectionContext
from raincheck_hf.selection.greedy import coverage, ranked
from raincheck_hf.selection.registry import register_selector
from raincheck_hf.selection.similarity import cosines

ALPHA = 0.5
TEXT_TEMPERATURE = 0.01
VISION_TEMPERATURE = 0.2


def coverage_matrix(context: SelectionContext) -> Tensor:
    """C = [softmax(Z Xᵀ/τ_t)/m ; α·softmax(F Fᵀ/τ_v)/n] on unit rows, fp32 [m + n, n].

    Without a query (m = 0) only the vision rows remain.
    """
    rows = torch.softmax(cosines(context.features, VISION_TEMPERATURE**-0.5), dim=-1)
    rows *= ALPHA / context.n
    query = context.unit_query
    if len(query) == 0:
        return rows
    text = torch.softmax(query @ context.unit_embeds.T / TEXT_TEMPERATURE, dim=-1) / len(query)
    return torch.cat([text, rows])


@register_selector("mmtok")
def mmtok(context: SelectionContext) -> Tensor:
    """Greedy maximum of f(T) = Σ_rows max_{j∈T} C; the rest by the gain that it would still bring.

    Needs `features` and uses `query`. One fp32 matrix of [m + n, n].
    """
    # Each row of C sums to 1/m or α/n, so that no column sums to more than 1 + α.
    return ranked(*coverage(coverage_matrix(context), context.budget, ceiling=1 + ALPHA))
