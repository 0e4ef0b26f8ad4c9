"""A seeded draw, the baseline that any method has to beat."""

from __future__ import annotations

import torch
from torch import Tensor

from raincheck_hf.selection.context import SelectionContext
from raincheck_hf.selection.registry import register_selector


@register_selector("random")
def random(context: SelectionContext) -> Tensor:
    """Independent scores, drawn on the CPU: one seed gives the same tokens on every device."""
    return torch.rand(context.n, generator=context.generator).to(context.device)
