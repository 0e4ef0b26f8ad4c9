"""CDPruner (arXiv 2506.10967): a determinantal point process conditioned on the question."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from raincheck_hf.selection.context import SelectionContext
from raincheck_hf.selection.greedy import determinant, ranked
from raincheck_hf.selection.registry import register_selector
from raincheck_hf.selection.similarity import cosines, lengths, scaled

THETA = 0.5
"""Weight of relevance against diversity, in [0, 1): 0 is a plain DPP."""


def relevance(context: SelectionContext) -> Tensor:
    """Cosine with the mean query embedding, scaled to (0, 1]; fp32 [n].

    All ones where there is no query, or where every token is equally near.
    """
    if len(context.query) == 0:
        return torch.ones(context.n, device=context.device)
    centre = F.normalize(context.query.float().mean(0), dim=0)
    cosine = (context.embeds.float() @ centre) / lengths(context.embeds)
    low, high = cosine.aminmax()
    # The offset keeps the least relevant token above 0 and divides no flat range by zero.
    offset = 1e-6
    return (cosine - low + offset) / (high - low + offset)


def conditioned(similar: Tensor, relevant: Tensor) -> Tensor:
    """L = diag(r) S diag(r), r = exp(η·relevance), η = θ/(2(1−θ)).

    Args:
        similar: S, cosines of X, fp32 [n, n]; overwritten.
        relevant: fp32 [n].
    """
    weight = torch.exp(relevant * (THETA / (2 * (1 - THETA))))
    kernel = scaled(similar, weight)
    # A cosine of 1 up to rounding would let rounding choose among equally relevant tokens.
    kernel.diagonal().copy_(weight.square())
    return kernel


@register_selector("cdpruner")
def cdpruner(context: SelectionContext) -> Tensor:
    """Greedy MAP of det(L_T); the rest, also where the rank of L is used up, by relevance.

    Uses `query`. One fp32 matrix of [n, n] and one of [budget, n].
    """
    similar = cosines(context.embeds)  # first: a GPU multiplies while the host goes on
    relevant = relevance(context)
    # The diagonal is exp(2η·relevance), and relevance 1 at most, up to rounding.
    ceiling = 1.01 * math.exp(THETA / (1 - THETA))
    picks, _ = determinant(conditioned(similar, relevant), context.budget, ceiling)
    return ranked(picks, relevant)
