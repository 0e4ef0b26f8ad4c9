"""VisPruner (arXiv 2412.01818): salient tokens first, then what is left without its duplicates."""

from __future__ import annotations

import torch
from torch import Tensor

from raincheck_hf.selection.context import SelectionContext
from raincheck_hf.selection.greedy import ranked, thinned
from raincheck_hf.selection.registry import register_selector
from raincheck_hf.selection.similarity import cosines

ROUNDS = 32
"""Duplicates leave in about this many rounds, however many tokens there are."""


@register_selector("vispruner")
def vispruner(context: SelectionContext) -> Tensor:
    """Half of the budget (rounded up) by attention, half by removing duplicates in F.

    Needs `features` and `attention`. Picks are ranked by attention within their half, the rest by
    attention. One fp32 matrix of [n, n].
    """
    salience = context.salience
    order = torch.sort(salience, descending=True, stable=True).indices
    important, residual = order.tensor_split([(context.budget + 1) // 2])
    diverse = context.budget - len(important)
    if diverse == 0:
        return salience
    residual = residual.sort().values
    survivors = thinned(cosines(context.features), diverse, ROUNDS, residual)
    survivors = survivors[torch.sort(salience[survivors], descending=True, stable=True).indices]
    return ranked(torch.cat([important, survivors]), salience)
