"""Every n-th token."""

from __future__ import annotations

import torch
from torch import Tensor

from raincheck_hf.selection.context import SelectionContext
from raincheck_hf.selection.registry import register_selector


@register_selector("uniform")
def uniform(context: SelectionContext) -> Tensor:
    """The middle token of each of `budget` equal stretches, in source order; the rest are equal."""
    picks = torch.arange(context.budget)
    picks = (2 * picks + 1) * context.n // (2 * context.budget)
    return torch.zeros(context.n, device=context.device).index_fill_(
        0, picks.to(context.device), 1.0
    )
