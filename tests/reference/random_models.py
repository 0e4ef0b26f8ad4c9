"""Small models of the real classes whose outputs depend on everything.

A feature that does nothing must not pass a test by accident: norms, biases and gates are not
the identity, and recurrent layers remember for long.
"""

from __future__ import annotations

import torch
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

VOCABULARY = 128
TEXT_TOKENS = 120
"""Ids below are text; those from here on are special."""

_SPECIAL = {
    "vision_start_token_id": 120,
    "vision_end_token_id": 121,
    "image_token_id": 122,
    "video_token_id": 123,
}

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}

_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 64,
}

_QWEN3_VL_TEXT = {
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}

_QWEN3_5_TEXT = {
    "head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
        "partial_rotary_factor": 0.25,
    },
    # K and V differ, so that a transposed state cannot pass.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}

ARCHITECTURES = ("qwen3_vl", "qwen3_5")


def random_model(
    architecture: str, seed: int = 0, *, text: dict | None = None, vision: dict | None = None
) -> torch.nn.Module:
    """A small random model in fp32 on the CPU, in eval mode.

    Args:
        architecture: "qwen3_vl" (DeepStack into three text layers) or "qwen3_5" (three
            recurrent layers, then one of full attention).
        seed: Of the weights; the global generator is left alone.
        text: Overrides of the text config, such as `num_hidden_layers=8`.
        vision: Overrides of the vision config.
    """
    text, vision = text or {}, vision or {}
    out = {"out_hidden_size": text.get("hidden_size", _TEXT["hidden_size"])}
    if architecture == "qwen3_vl":
        config = Qwen3VLConfig(
            text_config=_TEXT | _QWEN3_VL_TEXT | text,
            vision_config=_VISION | out | {"deepstack_visual_indexes": [0, 1, 2]} | vision,
            **_SPECIAL,
        )
        build = Qwen3VLForConditionalGeneration
    elif architecture == "qwen3_5":
        config = Qwen3_5Config(
            text_config=_TEXT | _QWEN3_5_TEXT | text,
            vision_config=_VISION | out | vision,
            **_SPECIAL,
        )
        build = Qwen3_5ForConditionalGeneration
    else:
        raise ValueError(f"architecture={architecture!r}: choose one of {ARCHITECTURES}")
    with torch.random.fork_rng(devices=[]):
        model = build(config).eval()
    randomise(model, torch.Generator().manual_seed(seed))
    # Their logits are zero, hence never the largest: no answer holds an image token.
    model.lm_head.weight.data[TEXT_TOKENS:] = 0
    return model


@torch.no_grad()
def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Give every parameter a value that shows.

    Matrices keep the size of what passes through them, vectors (norms, biases, `dt_bias`)
    leave their initial value by about 0.2, and `A_log` is uniform in (-6, -2.5): decays
    between 0.9 and 0.997 a token.
    """
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            parameter.copy_(torch.rand(parameter.shape, generator=generator) * 3.5 - 6.0)
        elif parameter.ndim == 1:
            parameter.add_(0.2 * noise)
        elif name.endswith(("embed_tokens.weight", "pos_embed.weight")):
            parameter.copy_(noise)
        else:
            parameter.copy_(noise / parameter[0].numel() ** 0.5)
