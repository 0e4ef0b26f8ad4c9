"""VidCom² (arXiv 2505.14454): more tokens for unusual frames, unusual tokens in every frame."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from raincheck_hf.selection.context import SelectionContext
from raincheck_hf.selection.greedy import ranked
from raincheck_hf.selection.registry import register_selector
from raincheck_hf.selection.video import apportion, item_budgets, spread_images

TEMPERATURE = 0.01


def _centre(unit: Tensor) -> Tensor:
    """Direction of the mean over tokens: [..., tokens, d] to [..., 1, d]."""
    return F.normalize(unit.mean(-2, keepdim=True), dim=-1)


def frame_budgets(to_video: Tensor, budget: int) -> list[int]:
    """Tokens of each frame: proportional to 1 + σ_t − 1/T.

    σ is the softmax, at temperature 0.01, of a frame's mean dissimilarity to the video's centre.

    Args:
        to_video: [T, M] cosine of each token with the video's centre.
        budget: to split.
    """
    frames, tokens = to_video.shape
    unusual = torch.softmax(-to_video.mean(1) / TEMPERATURE, dim=0)
    return apportion(budget, (1 + unusual - 1 / frames).tolist(), [tokens] * frames)


def _video_scores(unit: Tensor, centre: Tensor, budget: int) -> Tensor:
    """Scores [T·M] of one video, or of a frame of it, from unit rows [T, M, d]."""
    to_video = (unit * centre).sum(-1)
    score = -(to_video + (unit * _centre(unit)).sum(-1))
    order = torch.sort(score, dim=1, descending=True, stable=True).indices
    frames, tokens = score.shape
    at = torch.arange(tokens, device=unit.device)
    counts = torch.tensor(frame_budgets(to_video, budget)).to(unit.device)
    start = torch.arange(frames, device=unit.device)[:, None] * tokens
    picks = (start + order)[at < counts[:, None]]
    flat = score.flatten()
    best_first = torch.sort(flat[picks], descending=True, stable=True).indices
    return ranked(picks[best_first], flat)


@register_selector("vidcom2")
def vidcom2(context: SelectionContext) -> Tensor:
    """Frame budgets by uniqueness, then the tokens least like the video's and the frame's centre.

    Each video of a group gets its part of the budget by size. In scope `"frame"` the scope has set
    the frame budgets, and only the second half applies. Images are evenly spread.
    """
    scores = torch.zeros(context.n, device=context.device)
    for index, budget in enumerate(item_budgets(context)):
        if context.kind[index] == "image":
            continue
        t, h, w = context.grid[index]
        place = slice(*context.item_spans[index])
        centre = _centre(context.whole.unit_embeds[slice(*context.whole_item(index))])
        unit = context.unit_embeds[place].view(t, h * w, -1)
        scores[place] = _video_scores(unit, centre, budget)
    return spread_images(context, scores, "vidcom2")
