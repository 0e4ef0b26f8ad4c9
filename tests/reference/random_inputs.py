"""Random inputs laid out as a processor lays them out, without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .prompts import Prompt
from .random_models import TEXT_TOKENS

Segment = tuple[str, int] | tuple[str, int, int] | tuple[str, int, int, int]

LAYOUTS: dict[str, tuple[Segment, ...]] = {
    "text only": (("text", 11),),
    "one image": (("text", 4), ("image", 4, 3), ("text", 5)),
    "two images": (("text", 3), ("image", 2, 4), ("text", 2), ("image", 3, 3), ("text", 4)),
    "one video": (("text", 3), ("video", 3, 2, 3), ("text", 4)),
    "image, video, image": (
        ("text", 3),
        ("image", 3, 2),
        ("text", 2),
        ("video", 2, 2, 3),
        ("image", 2, 3),
        ("text", 4),
    ),
    "video, image, video": (
        ("video", 2, 2, 2),
        ("text", 2),
        ("image", 3, 2),
        ("video", 1, 2, 3),
        ("text", 4),
    ),
}
"""Sizes are in merged cells: an image has height and width, a video also frames first."""

SECONDS = (5.0, 0.4, 1.0)
"""Between temporal patches, of the first, second, third video of a prompt, on Qwen2.5-VL: so far
apart that time runs ahead of the text, and so close that it is rounded."""


def random_inputs(
    model: torch.nn.Module, seed: int, layout: str | Sequence[Segment] = "one image"
) -> dict[str, Tensor]:
    """What a processor would give for one random prompt, batch of one.

    An image is `start pad … pad end`. A video is `start`, then for every temporal patch a
    timestamp of text and `start pad … pad end`, then `end`; on Qwen2.5-VL it is one
    `start pad … pad end`, and the seconds between its temporal patches go beside the ids.

    Args:
        model: Whose special ids and patch sizes to use.
        seed: Of tokens and pixels.
        layout: A name in `LAYOUTS`, or segments ("text", tokens), ("image", height, width),
            ("video", frames, height, width), sizes in merged cells.

    Returns:
        `input_ids`, `attention_mask`, `mm_token_type_ids` [1, L] (0 text, 1 image, 2 video)
        and, where there are any, `pixel_values` with `image_grid_thw`,
        `pixel_values_videos` with `video_grid_thw`, `second_per_grid_ts` [videos].
    """
    generator = torch.Generator().manual_seed(seed)
    config, vision = model.config, model.config.vision_config
    merge = vision.spatial_merge_size
    timed_by_position = config.model_type == "qwen2_5_vl"
    seconds: list[float] = []
    ids: list[int] = []
    kinds: list[int] = []
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}

    def put(tokens: list[int], kind: int = 0) -> None:
        ids.extend(tokens)
        kinds.extend([kind] * len(tokens))

    def text(count: int) -> list[int]:
        return torch.randint(TEXT_TOKENS, (count,), generator=generator).tolist()

    def picture(token: int, kind: int, cells: int) -> None:
        put([config.vision_start_token_id])
        put([token] * cells, kind)
        put([config.vision_end_token_id])

    for name, *size in LAYOUTS[layout] if isinstance(layout, str) else layout:
        if name == "text":
            put(text(size[0]))
        elif name == "image":
            height, width = size
            picture(config.image_token_id, 1, height * width)
            grids["image"].append([1, height * merge, width * merge])
        elif name == "video":
            frames, height, width = size
            if timed_by_position:
                picture(config.video_token_id, 2, frames * height * width)
                seconds.append(SECONDS[len(seconds) % len(SECONDS)])
            else:
                put([config.vision_start_token_id])
                for _ in range(frames):
                    put(text(3))
                    picture(config.video_token_id, 2, height * width)
                put([config.vision_end_token_id])
            grids["video"].append([frames, height * merge, width * merge])
        else:
            raise ValueError(f"segment {name!r}: choose text, image or video")

    inputs = {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        "mm_token_type_ids": torch.tensor([kinds], dtype=torch.int),
    }
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    for name, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if grids[name]:
            grid = torch.tensor(grids[name])
            count = int(grid.prod(1).sum())
            inputs[pixels] = torch.randn(count, patch, generator=generator)
            inputs[f"{name}_grid_thw"] = grid
    if seconds:
        inputs["second_per_grid_ts"] = torch.tensor(seconds)
    return inputs


def next_turn(
    inputs: Mapping[str, Tensor], answer: Sequence[int], new: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The whole conversation after a turn: its inputs, the answer, and the new input."""
    tokens = torch.tensor([list(answer)], dtype=torch.long)
    middle = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": torch.zeros_like(tokens, dtype=torch.int),
    }
    joined = {name: torch.cat([inputs[name], middle[name], new[name]], 1) for name in middle}
    for name in (*inputs, *new):
        if name not in joined:
            parts = [part[name] for part in (inputs, new) if name in part]
            joined[name] = torch.cat(parts)
    return joined


def random_selection(prompt: Prompt, seed: int = 0, retention: float = 0.4) -> Prompt:
    """The same prompt with each visual row in P with probability `retention`.

    Raises:
        ValueError: If all visual rows, or none, were drawn: nothing could be tested with it.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(len(prompt.visual), generator=generator) < retention
    selected = ~prompt.visual | drawn.to(prompt.visual.device)
    selected[-1] = True
    deferred, visual = int((~selected).sum()), int(prompt.visual.sum())
    if not 0 < deferred < visual:
        raise ValueError(f"{deferred} of {visual} visual rows are deferred: take another seed")
    return replace(prompt, selected=selected)
