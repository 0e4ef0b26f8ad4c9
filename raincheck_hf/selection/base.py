"""From scores to a selection: ratio, scope, rounding, ties, bad returns; once for all methods."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from raincheck_hf.selection.context import Grid, SelectionContext
from raincheck_hf.selection.registry import Selector, get_selector, selector_name

SCOPES = ("prompt", "item", "frame")


@dataclass(frozen=True)
class Selection:
    """Which multimodal tokens are prefilled first.

    Attributes:
        mask: bool [n], on the embeddings' device, in source order; True is selected.
        scores: fp32 [n], higher is more relevant; may hold infinities, never NaN. Within a scope
            group no deferred token scores above a selected one.
        count: How many are selected; None where only the device knows.
        name: Of the selector.
    """

    mask: Tensor
    scores: Tensor
    count: int | None
    name: str

    def check(self) -> Selection:
        """Wait for the scores and look at them.

        Raises:
            ValueError: Some are NaN.
        """
        nan = int(self.scores.isnan().sum())
        if nan:
            raise ValueError(f"selector {self.name!r} returned NaN for {nan} tokens")
        return self


def keep_count(retention: float, n: int) -> int:
    """⌈retention · n⌉ as written on paper, at least 1 and at most n.

    In binary, 0.07 * 100 is above 7; the relative slack keeps such a product from gaining a token.
    """
    return max(1, min(n, math.ceil(retention * n * (1 - 1e-12))))


@torch.no_grad()
def select(
    context: SelectionContext,
    selector: str | Selector,
    retention: float,
    scope: str = "prompt",
    wait: bool = True,
) -> Selection:
    """Run a selector over every scope group of an input.

    Each group keeps its ⌈retention·n⌉ highest scores, at least 1; equal scores go by index. A bool
    mask is taken as the selection itself: its count need not match the ratio, but every group
    keeps at least one token. With retention 1 everything is selected and no selector runs.

    Args:
        context: the whole input; n = 0 gives an empty selection.
        selector: a registered name, or a callable that maps a group's context to float scores [n]
            (infinities allowed) or a bool mask [n].
        retention: in (0, 1].
        scope: `"prompt"`, `"item"` or `"frame"`: what the ratio is taken over.
        wait: whether to look for NaN at once; if not, the caller calls `check`, and a GPU runs on.

    Raises:
        ValueError: retention or scope out of range, an unknown selector name, a selector that
            raised (its exception is the cause), scores of a wrong length or with NaN, a mask
            that keeps nothing. Running out of memory is passed on as it is.
        TypeError: the selector is neither name nor callable, or returned no float or bool tensor.
    """
    if not 0 < retention <= 1:
        raise ValueError(f"retention must be in (0, 1], got {retention}")
    if scope not in SCOPES:
        raise ValueError(f"scope must be one of {', '.join(SCOPES)}, got {scope!r}")
    function, name = get_selector(selector), selector_name(selector)

    mask = torch.ones(context.n, dtype=torch.bool, device=context.device)
    scores = torch.ones(context.n, dtype=torch.float32, device=context.device)
    if context.n == 0 or retention == 1:
        return Selection(mask, scores, context.n, name)

    count: int | None = 0
    for start, grid, kind in _groups(context, scope):
        size = sum(t * h * w for t, h, w in grid)
        group = context.group(start, grid, kind, keep_count(retention, size))
        returned = _call(function, name, group)
        scores[start : start + size] = returned
        mask[start : start + size] = (
            returned if returned.dtype == torch.bool else _top(returned, group.budget)
        )
        if returned.dtype != torch.bool:
            count = None if count is None else count + group.budget
            continue
        count = None
        if not returned.any():
            raise ValueError(
                f"selector {name!r} returned a mask that keeps none of {size} tokens; "
                "at least one must be kept"
            )
    selection = Selection(mask, scores, count, name)
    return selection.check() if wait else selection


def _groups(
    context: SelectionContext, scope: str
) -> list[tuple[int, tuple[Grid, ...], tuple[str, ...]]]:
    """(start, grids, kinds) of each scope group; groups are consecutive runs of tokens."""
    if scope == "prompt":
        return [(0, context.grid, context.kind)]
    items = zip(context.item_spans, context.grid, context.kind, strict=True)
    if scope == "item":
        return [(start, (grid,), (kind,)) for (start, _), grid, kind in items]
    return [
        (start + frame * h * w, ((1, h, w),), (kind,))
        for (start, _), (t, h, w), kind in items
        for frame in range(t)
    ]


def _call(function: Selector, name: str, group: SelectionContext) -> Tensor:
    """The selector's answer for one group, [n] bool or float, on the group's device."""
    try:
        returned = function(group)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"selector {name!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(returned, Tensor):
        raise TypeError(
            f"selector {name!r} must return a tensor of {group.n} float scores or a bool mask, "
            f"got {type(returned).__name__}"
        )
    if returned.dtype != torch.bool and not returned.is_floating_point():
        raise TypeError(
            f"selector {name!r} must return float scores or a bool mask, got {returned.dtype}; "
            "use .float() for scores or .bool() for a mask"
        )
    if returned.shape != (group.n,):
        raise ValueError(
            f"selector {name!r} must return shape [{group.n}], one score a token, "
            f"got {list(returned.shape)}"
        )
    return returned.detach().to(group.device)


def _top(scores: Tensor, count: int) -> Tensor:
    """Bool mask of the `count` highest scores; a stable sort lets equal ones go by index."""
    best = torch.sort(scores, descending=True, stable=True).indices[:count]
    return torch.zeros_like(scores, dtype=torch.bool).index_fill_(0, best, True)
