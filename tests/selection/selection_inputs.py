"""Two random vision-language models, small enough to build in a test, and inputs for selectors."""

from __future__ import annotations

import torch
from torch import nn
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from raincheck_hf.selection import SelectionContext

VISION: dict[str, object] = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 24,
    "num_position_embeddings": 64,
    "initializer_range": 0.3,
}
TEXT = {
    "vocab_size": 128,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
TOKENS = {
    "image_token_id": 120,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "qwen3_vl":
        config = Qwen3VLConfig(
            vision_config={**VISION, "deepstack_visual_indexes": [0, 1]},
            text_config={**TEXT, "rope_parameters": ROPE},
            **TOKENS,
        )
        return Qwen3VLForConditionalGeneration(config).eval()
    config = Qwen3_5Config(
        vision_config=VISION,
        text_config={
            **TEXT,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0},
            "layer_types": ["full_attention"],
        },
        **TOKENS,
    )
    return Qwen3_5ForConditionalGeneration(config).eval()


# Items in merged units: one image, one video, both kinds mixed and of different sizes.
LAYOUTS = {
    "image": ([(1, 5, 7)], ["image"]),
    "images": ([(1, 4, 5), (1, 3, 6)], ["image", "image"]),
    "video": ([(5, 3, 4)], ["video"]),
    "mixed": ([(1, 4, 4), (3, 3, 4), (1, 2, 5), (2, 3, 3)], ["image", "video", "image", "video"]),
}


def make_context(
    layout: str, seed: int = 0, query: int = 5, **overrides: object
) -> SelectionContext:
    """Random tensors, float32, in the given layout."""
    grid, kind = LAYOUTS[layout]
    n = sum(t * h * w for t, h, w in grid)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    fields: dict[str, object] = {
        "embeds": draw(n, 48) + 0.5,
        "grid": grid,
        "kind": kind,
        "features": draw(n, 20) + 0.5,
        "attention": draw(n).exp() / n,
        "query": draw(query, 48) + 0.3,
        "seed": seed,
    }
    return SelectionContext(**{**fields, **overrides})  # type: ignore[arg-type]
