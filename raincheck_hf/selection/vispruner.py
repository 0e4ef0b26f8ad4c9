"""VisPruner (arXiv 2412.01818): salient tokens first, then what is left without its duplicates."""

from __future__ import annotations

import torch
from torch import Tensor

from raincheck_hf.selection.context import SelectionContext
from raincheck_hf.selection.greedy import ranked
from raincheck_hf.selection.registry import register_selector

ROUNDS = 32
"""Duplicates leave in about this many rounds, however many tokens there are."""


def without_duplicates(unit: Tensor, keep: int) -> Tensor:
    """Thin rows out until `keep` are left, nearest duplicates first.

    Each round deals the remaining rows alternately into two hands and drops, from the first hand,
    the rows most similar to some row of the second. A row and its only duplicate can fall into
    one hand; dealing anew after each round parts them.

    Args:
        unit: [n, d'] rows of length 1.
        keep: 1 ≤ keep ≤ n.

    Returns:
        int64 [keep], ascending indices of the rows left.
    """
    left = torch.arange(len(unit), device=unit.device)
    step = max(1, -(-(len(unit) - keep) // ROUNDS))
    while len(left) > keep:
        first, second = left[0::2], left[1::2]
        nearest = (unit[first] @ unit[second].T).amax(1)
        order = torch.sort(nearest, descending=True, stable=True).indices
        drop = min(step, len(left) - keep, len(first))
        left = torch.cat([first[order[drop:]], second]).sort().values
    return left


@register_selector("vispruner")
def vispruner(context: SelectionContext) -> Tensor:
    """Half of the budget (rounded up) by attention, half by removing duplicates in F.

    Needs `features` and `attention`. Picks are ranked by attention within their half, the rest by
    attention.
    """
    salience = context.attention.float()
    order = torch.sort(salience, descending=True, stable=True).indices
    important, residual = order.tensor_split([(context.budget + 1) // 2])
    diverse = context.budget - len(important)
    if diverse == 0:
        return salience
    residual = residual.sort().values
    survivors = residual[without_duplicates(context.unit_features[residual], diverse)]
    survivors = survivors[torch.sort(salience[survivors], descending=True, stable=True).indices]
    return ranked(torch.cat([important, survivors]), salience)
