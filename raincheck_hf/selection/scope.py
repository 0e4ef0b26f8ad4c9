"""SCOPE (arXiv 2510.24214): coverage of the picture, weighted by saliency."""

from __future__ import annotations

from torch import Tensor

from raincheck_hf.selection.context import SelectionContext
from raincheck_hf.selection.greedy import coverage, ranked
from raincheck_hf.selection.registry import register_selector


@register_selector("scope")
def scope(context: SelectionContext) -> Tensor:
    """Greedy by gain_j = s_j Σ_i max(0, S_ij − c_i); the rest by the gain that they still bring.

    s is `attention`, S the cosines of X, and c_i = max(0, max_{j∈T} S_ij) how well token i is
    covered so far. One fp32 matrix of [n, n].
    """
    unit = context.unit_embeds
    return ranked(*coverage(unit @ unit.T, context.budget, context.attention))
