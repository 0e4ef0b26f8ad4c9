"""The lean vision tower against the model's own, kernels interpreted. A program: see below.

Triton interprets only if told at its import, so this runs by itself: ``python lean_tower.py KIND``,
KIND ``torch`` or ``kernel``, which is whose attention runs.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any
from unittest import mock

import torch
from reference import random_model

from raincheck_hf.executor import vision_blocks
from raincheck_hf.executor.tower import LeanTower
from raincheck_hf.kernels import vision_attention
from raincheck_hf.models import vision

torch.set_num_threads(1)
GRIDS = {
    "an image": [[1, 4, 6]],
    "images of several sizes": [[1, 4, 4], [1, 6, 2], [1, 4, 4]],
    "a video": [[3, 4, 4]],
}
# Heads of the real width, 72, and DeepStack behind the first and the last block.
SHAPE = {"hidden_size": 144, "intermediate_size": 80, "num_heads": 2, "depth": 3}


def main(by_kernel: bool) -> None:
    # The towers differ in DeepStack alone; an interpreted kernel is tried on the one that has it.
    for architecture in ("qwen3_vl",) if by_kernel else ("qwen3_vl", "qwen3_5"):
        taps = {"deepstack_visual_indexes": [0, 2]} if architecture == "qwen3_vl" else {}
        model = random_model(architecture, seed=3, vision={**SHAPE, **taps})
        tower: Any = model.model.visual
        lean = LeanTower(tower)
        assert lean.fits(tower)
        attend = mock.Mock(wraps=vision_attention.repeated_attend)
        with (
            torch.no_grad(),
            mock.patch.object(vision_attention, "made_for", return_value=by_kernel),
            mock.patch.object(vision_blocks, "repeated_attend", attend),
            mock.patch.object(vision_blocks, "_KERNEL_FROM", 1),
            mock.patch.object(vision_blocks, "TILES", vision_attention.Tiles(16, 16)),
        ):
            for name, grid in GRIDS.items():
                compare(model, lean, grid, f"{architecture}, {name}")
        assert attend.call_count == 2 * by_kernel * len(GRIDS)  # for the last block another one


def compare(model: Any, lean: LeanTower, grid: list[list[int]], name: str) -> None:
    """All that a pass yields, through the seam that executors use."""
    draw = torch.Generator().manual_seed(7)
    patches = sum(t * h * w for t, h, w in grid)
    width = model.model.visual.patch_embed.proj.weight[0].numel()
    pixels = torch.randn(patches, width, generator=draw)
    sizes = torch.tensor(grid)
    own = vision.encode(model, pixels, sizes)
    ours = vision.encode(model, pixels, sizes, run_tower=lean.run)
    assert len(own.deepstack) == len(ours.deepstack)
    pairs = [
        ("embeds", own.embeds, ours.embeds),
        ("features", own.features, ours.features),
        ("attention", own.attention, ours.attention),
        *(
            (f"deepstack {i}", a, b)
            for i, (a, b) in enumerate(zip(own.deepstack, ours.deepstack, strict=True))
        ),
    ]
    for part, wanted, found in pairs:
        far = float((found - wanted).norm() / wanted.norm())
        assert far < 2e-6, (name, part, far)


if __name__ == "__main__":
    main({"torch": False, "kernel": True}[sys.argv[1]])
    print("agrees")
