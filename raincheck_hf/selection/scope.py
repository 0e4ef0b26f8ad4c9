"""SCOPE (arXiv 2510.24214): coverage of the picture, weighted by saliency."""

from __future__ import annotations

from torch import Tensor

from raincheck_hf.selection.context import SelectionContext
from raincheck_hf.selection.greedy import coverage, ranked
from raincheck_hf.selection.registry import register_selector
from raincheck_hf.selection.similarity import cosines


@register_selector("scope")
def scope(context: SelectionContext) -> Tensor:
    """Greedy by gain_j = s_j Σ_i max(0, S_ij − c_i); the rest by the gain that they still bring.

    s is `salience`, S the cosines of X, and c_i = max(0, max_{j∈T} S_ij) how well token i is
    covered so far. One fp32 matrix of [n, n], two on a GPU.
    """
    similar = cosines(context.embeds)
    # A cosine is 1 at most, up to rounding.
    return ranked(*coverage(similar, context.budget, context.salience, ceiling=1.01 * context.n))
