"""What the methods for video share: budgets, an even spread, and images beside the videos."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from raincheck_hf.selection.context import SelectionContext

logger = logging.getLogger(__name__)

_GOLDEN = (math.sqrt(5) - 1) / 2


def apportion(total: int, weights: Sequence[float], caps: Sequence[int]) -> list[int]:
    """Split a total in proportion to weights, whole numbers, none above its cap.

    What a capped share cannot take goes to the others; largest remainders round up, by index
    where equal.

    Args:
        total: at most the sum of the caps.
        weights: positive.
        caps: most that each share can take.
    """
    shares = [0] * len(weights)
    free = list(range(len(weights)))
    while free:
        scale = (total - sum(shares)) / sum(weights[i] for i in free)
        full = [i for i in free if weights[i] * scale >= caps[i]]
        if not full:
            break
        for i in full:
            shares[i] = caps[i]
        free = [i for i in free if i not in full]
    else:
        return shares
    quota = {i: weights[i] * scale for i in free}
    for i in free:
        shares[i] = math.floor(quota[i])
    left = total - sum(shares)
    for i in sorted(free, key=lambda i: shares[i] - quota[i])[:left]:
        shares[i] += 1
    return shares


def item_budgets(context: SelectionContext) -> list[int]:
    """Each item's part of the budget, in proportion to its tokens."""
    sizes = [stop - start for start, stop in context.item_spans]
    return apportion(context.budget, sizes, sizes)


def spread(n: int, device: torch.device) -> Tensor:
    """fp32 [n] in [0, 1): the k highest are spread about evenly over 0 ... n − 1, for every k.

    Multiples of the golden ratio, modulo 1, leave no large gap, wherever they are cut.
    """
    return 1 - torch.frac(torch.arange(1, n + 1, dtype=torch.float64) * _GOLDEN).to(
        device, torch.float32
    )


def spread_images(context: SelectionContext, scores: Tensor, method: str) -> Tensor:
    """Settle the images of a group, of which a method for video knows nothing.

    An image keeps its part of the budget, evenly spread: these score +inf and the image's others
    −inf, so that exactly the videos' part is left to the scores of the videos.

    Args:
        context: a group of any items.
        scores: fp32 [n], finite at the videos; values at images are replaced.
        method: for a log line where an input holds no video at all.
    """
    if "video" not in context.whole.kind:
        _log_no_video(method)
    scores = scores.clone()
    for kind, (start, stop), share in zip(
        context.kind, context.item_spans, item_budgets(context), strict=True
    ):
        if kind == "image":
            order = spread(stop - start, context.device).argsort(descending=True)
            scores[start:stop] = -torch.inf
            scores[start + order[:share]] = torch.inf
    return scores


@lru_cache
def _log_no_video(method: str) -> None:
    logger.warning(
        "selector %r is for video; an input with images only gets evenly spread tokens", method
    )
