"""The tokens that the vision tower looks at, the dominant half of VisionZip (arXiv 2412.04467)."""

from __future__ import annotations

from torch import Tensor

from raincheck_hf.selection.context import SelectionContext
from raincheck_hf.selection.registry import register_selector


@register_selector("saliency")
def saliency(context: SelectionContext) -> Tensor:
    """The attention that a token receives, over the mean of its frame. Needs `attention`."""
    return context.salience
