"""Made-up inputs for timing selectors: the widths of real models, and something of a picture."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from raincheck_hf.selection import SelectionContext

WIDTH = 4096
"""Of the language model: Qwen3-VL-8B, Qwen3.5-9B."""
VISION_WIDTH = 1152
QUERY = 32
"""Tokens of the question."""
VIDEO = ("evs", "vidcom2")
_COARSE = 8


def grid_of(tokens: int, video: bool) -> tuple[int, int, int]:
    """(t, h, w) of so many tokens: one square image, or square frames of up to 256.

    Raises:
        ValueError: the tokens are not a power of 4, 256 or more.
    """
    side = math.isqrt(tokens)
    if tokens < 256 or side * side != tokens or side & (side - 1):
        raise ValueError(f"sizes must be powers of 4, 256 or more; got {tokens}")
    if not video:
        return 1, side, side
    frame = min(256, tokens // 4)
    return tokens // frame, math.isqrt(frame), math.isqrt(frame)


def make_input(
    selector: str, tokens: int, device: str, dtype: torch.dtype, seed: int = 0
) -> SelectionContext:
    """An input that suits a selector: embeddings vary smoothly over the picture, plus noise.

    Args:
        selector: methods for video get a video.
        tokens: n, a power of 4.
        device: where tensors are made.
        dtype: of embeddings and features.
        seed: of the draw.
    """
    video = selector in VIDEO
    grid = grid_of(tokens, video)
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def field(width: int) -> Tensor:
        _, h, w = grid
        coarse = draw(1, width, _COARSE, _COARSE)
        smooth = F.interpolate(coarse, (h, w), mode="bilinear").flatten(2)[0].T
        return smooth.repeat(grid[0], 1) + 0.5 * draw(tokens, width) + 0.5 * draw(width)

    embeds = field(WIDTH)
    near = embeds[torch.arange(QUERY, device=device) * tokens // QUERY]
    attention = draw(tokens).exp()
    return SelectionContext(
        embeds.to(dtype),
        [grid],
        ["video" if video else "image"],
        query=(near + draw(QUERY, WIDTH)).to(dtype),
        features=field(VISION_WIDTH).to(dtype),
        attention=attention / attention.sum(),
        seed=seed,
    )


def again(context: SelectionContext) -> SelectionContext:
    """The same input with nothing computed yet."""
    return SelectionContext(
        context.embeds,
        context.grid,
        context.kind,
        query=context.query,
        features=context.features,
        attention=context.attention,
        seed=context.seed,
    )
