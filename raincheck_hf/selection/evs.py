"""Efficient Video Sampling (arXiv 2510.14624): tokens that changed since the previous frame."""

from __future__ import annotations

import torch
from torch import Tensor

from raincheck_hf.selection.context import SelectionContext
from raincheck_hf.selection.registry import register_selector
from raincheck_hf.selection.video import spread, spread_images


@register_selector("evs")
def evs(context: SelectionContext) -> Tensor:
    """1 − cos(x_t, x_{t−1}) at the same place; the first frame goes before every change.

    Where a first frame does not fit into the budget, it is thinned out evenly. A group may begin
    inside a video: the previous frame is then read from the whole input. Images are evenly spread.
    """
    unit = context.whole.unit_embeds
    offset = context.span[0]
    scores = torch.zeros(context.n, device=context.device)
    for index, (_, h, w) in enumerate(context.grid):
        frame = h * w
        video = context.whole_item(index)[0]
        start, stop = (offset + place for place in context.item_spans[index])
        changing = max(start, video + frame)
        # A change is at most 2, so that every first frame is above it.
        scores[start - offset : changing - offset] = (
            2 + spread(frame, context.device)[: changing - start]
        )
        similar = (unit[changing:stop] * unit[changing - frame : stop - frame]).sum(-1)
        scores[changing - offset : stop - offset] = 1 - similar
    return spread_images(context, scores, "evs")
