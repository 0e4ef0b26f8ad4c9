"""Models of the real sizes with random weights, and inputs for them without a processor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

_VISION = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
    "out_hidden_size": 4096, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
}  # fmt: skip
_QWEN3_VL_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}  # fmt: skip
_QWEN3_5_9B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
_SMALL = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512,
}  # fmt: skip
_SMALL_QWEN3_5 = {
    **_SMALL, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "mrope_section": [4, 2, 2],
        "mrope_interleaved": True, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
_SMALL_VISION = {
    **_VISION, "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2,
    "out_hidden_size": 128, "deepstack_visual_indexes": [0, 1],
}  # fmt: skip

_PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl_8b": (_QWEN3_VL_8B, {**_VISION, "deepstack_visual_indexes": [8, 16, 24]}),
    "qwen3_5_9b": (_QWEN3_5_9B, _VISION),
    "qwen3_vl_small": (_SMALL, _SMALL_VISION),
    "qwen3_5_small": (
        _SMALL_QWEN3_5,
        {
            **_VISION,
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
        },
    ),
}

SIZES = tuple(_PARTS)


def build(size: str, device: str) -> Any:
    """A model with random weights, bf16 on a GPU and fp32 on a CPU, in evaluation mode.

    Raises:
        ValueError: An unknown size; lists the known ones.
    """
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}; known: {', '.join(SIZES)}")
    # Markup ids at the end of the vocabulary; random answers rarely hit them.
    text, vision = _PARTS[size]
    last = int(text["vocab_size"])
    special: dict[str, Any] = {
        "image_token_id": last - 1, "video_token_id": last - 2,
        "vision_start_token_id": last - 3, "vision_end_token_id": last - 4,
    }  # fmt: skip
    qwen3_5 = size.startswith("qwen3_5")
    kind, config_kind = (
        (Qwen3_5ForConditionalGeneration, Qwen3_5Config)
        if qwen3_5
        else (Qwen3VLForConditionalGeneration, Qwen3VLConfig)
    )
    config = config_kind(text_config=text, vision_config=vision, **special)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    with torch.device(device):
        model = kind._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.lm_head.weight.data[last - 4 :] = 0  # an answer must not hold markup
    return model


def prompt(model: Any, height: int, width: int, text: int = 40, seed: int = 0) -> dict[str, Tensor]:
    """One picture of ``height`` × ``width`` tokens between ``text`` tokens of text."""
    config = model.config
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(10, 400, (text,), generator=draw)
    picture = torch.full((height * width,), config.image_token_id)
    ids = torch.cat(
        [
            words[: text // 2],
            torch.tensor([config.vision_start_token_id]),
            picture,
            torch.tensor([config.vision_end_token_id]),
            words[text // 2 :],
        ]
    )
    vision = config.vision_config
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    merge = vision.spatial_merge_size
    pixels = torch.randn(height * width * merge**2, patch, generator=draw)
    inputs = {
        "input_ids": ids[None],
        "pixel_values": pixels.to(model.dtype),
        "image_grid_thw": torch.tensor([[1, height * merge, width * merge]]),
    }
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}


def video(
    model: Any, frames: int, height: int, width: int, text: int = 40, seed: int = 0
) -> dict[str, Tensor]:
    """A video of ``frames`` pictures, two a frame of ``height`` × ``width`` tokens."""
    config, vision = model.config, model.config.vision_config
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(10, 400, (text,), generator=draw)
    times = frames // vision.temporal_patch_size
    place = torch.full((height * width,), config.video_token_id)
    begin, end = (
        torch.tensor([config.vision_start_token_id]),
        torch.tensor([config.vision_end_token_id]),
    )
    # Each frame stands between marks of its own, behind its time.
    stamps = torch.randint(10, 400, (times, 3), generator=draw)
    spans = [part for stamp in stamps for part in (stamp, begin, place, end)]
    ids = torch.cat([words[: text // 2], *spans, words[text // 2 :]])
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    merge = vision.spatial_merge_size
    pixels = torch.randn(times * height * width * merge**2, patch, generator=draw)
    inputs = {
        "input_ids": ids[None],
        "pixel_values_videos": pixels.to(model.dtype),
        "video_grid_thw": torch.tensor([[times, height * merge, width * merge]]),
    }
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}


def text_turn(model: Any, out: Any, text: int = 20, seed: int = 1) -> dict[str, Tensor]:
    """A follow-up of text: the sequences so far and ``text`` tokens more."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(10, 400, (1, text), generator=draw).to(model.device)
    return {"input_ids": torch.cat([out.sequences, words], dim=1)}
