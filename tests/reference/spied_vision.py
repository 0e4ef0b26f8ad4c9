"""A stock pass of a vision tower that works in windows, and what the tower held on its way."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor


class SpiedVision:
    """What Qwen2.5-VL's tower computes, in the order of its windows.

    Attributes:
        pixels: Random patches, [N, c].
        embeds: Merged rows in source order, [n, d].
        held: Patch rows that go into the merger, [N, d'].
        maps: Attention of one block, by segment, each [heads, patches, patches] in float64.
    """

    def __init__(self, model: Any, kind: str, grid: Tensor, block: int) -> None:
        """Run eager attention on a copy of the model.

        Args:
            model: The `...ForConditionalGeneration`.
            kind: "image" or "video".
            grid: [items, 3], in patches.
            block: Whose attention to keep.
        """
        twin = copy.deepcopy(model)
        tower = twin.model.visual
        tower.config._attn_implementation = "eager"
        width = tower.patch_embed.proj.weight[0].numel()
        generator = torch.Generator().manual_seed(1)
        self.pixels = torch.randn(int(grid.prod(-1).sum()), width, generator=generator)
        self.maps: list[Tensor] = []
        tower.merger.register_forward_hook(self._merge)
        spied = tower.blocks[block].attn
        place = type(spied).forward.__globals__
        eager = place["eager_attention_forward"]

        def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
            result = eager(module, *args, **kwargs)
            if module is spied:
                self.maps.append(result[1][0].double())
            return result

        place["eager_attention_forward"] = attend
        try:
            run = twin.get_image_features if kind == "image" else twin.get_video_features
            with torch.no_grad():
                self.embeds = torch.cat(run(self.pixels, grid, return_dict=True).pooler_output)
        finally:
            place["eager_attention_forward"] = eager

    def in_source_order(self, rows: Tensor) -> Tensor:
        """Token rows that are in window order: which token is where, the merged rows tell."""
        same = (self._merged[None] == self.embeds[:, None]).all(-1)
        if not bool((same.sum(0) == 1).all() and (same.sum(1) == 1).all()):
            raise ValueError("two tokens have the same merged row: take other pixels")
        return rows[same.int().argmax(1)]

    def _merge(self, module: Any, args: Any, output: Tensor) -> None:
        self.held, self._merged = args[0], output
