"""DivPrune (arXiv 2503.02175): the most different tokens."""

from __future__ import annotations

from torch import Tensor

from raincheck_hf.selection.context import SelectionContext
from raincheck_hf.selection.greedy import max_min, ranked
from raincheck_hf.selection.registry import register_selector
from raincheck_hf.selection.similarity import cosines


@register_selector("divprune")
def divprune(context: SelectionContext) -> Tensor:
    """Max-min diversity in cosine distance 1 − cos on X, greedily; the rest by their distance.

    Two fp32 matrices of [n, n].
    """
    return ranked(*max_min(1 - cosines(context.embeds), context.budget))
