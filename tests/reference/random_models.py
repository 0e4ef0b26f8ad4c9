"""Small models of the real classes whose outputs depend on everything.

A feature that does nothing must not pass a test by accident: norms, biases and gates are not
the identity, and recurrent layers remember for long.
"""

from __future__ import annotations

import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
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

_QWEN2_5_VL_TEXT = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [2, 3, 3],
    },
    "eos_token_id": None,
}

# Two merged cells a side: the pictures of `LAYOUTS` are cut into several windows, some smaller.
# The last block sees whole frames, as in the published models.
_QWEN2_5_VL_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "window_size": 16,
    "fullatt_block_indexes": [0, 2],
    "tokens_per_second": 4,
}

_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}

# The second layer is dense, so that both kinds of block are there.
_QWEN3_VL_MOE_TEXT = _QWEN3_VL_TEXT | _EXPERTS | {"mlp_only_layers": [1]}
_QWEN3_5_MOE_TEXT = _QWEN3_5_TEXT | _EXPERTS | {"shared_expert_intermediate_size": 48}

ARCHITECTURES = ("qwen3_vl", "qwen3_5", "qwen3_vl_moe", "qwen3_5_moe", "qwen2_5_vl")

_BUILD = {
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
}

_OWN_TEXT = {
    "qwen3_vl": _QWEN3_VL_TEXT,
    "qwen3_5": _QWEN3_5_TEXT,
    "qwen3_vl_moe": _QWEN3_VL_MOE_TEXT,
    "qwen3_5_moe": _QWEN3_5_MOE_TEXT,
    "qwen2_5_vl": _QWEN2_5_VL_TEXT,
}

_DEEPSTACK = _VISION | {"deepstack_visual_indexes": [0, 1, 2]}

_OWN_VISION = {
    "qwen3_vl": _DEEPSTACK,
    "qwen3_5": _VISION,
    "qwen3_vl_moe": _DEEPSTACK,
    "qwen3_5_moe": _VISION,
    "qwen2_5_vl": _QWEN2_5_VL_VISION,
}


def random_model(
    architecture: str, seed: int = 0, *, text: dict | None = None, vision: dict | None = None
) -> torch.nn.Module:
    """A small random model in fp32 on the CPU, in eval mode.

    Args:
        architecture: "qwen3_vl" (DeepStack into three text layers), "qwen3_5" (three
            recurrent layers, then one of full attention), the same with experts, or
            "qwen2_5_vl" (windows in the vision tower).
        seed: Of the weights; the global generator is left alone.
        text: Overrides of the text config, such as `num_hidden_layers=8`.
        vision: Overrides of the vision config.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture={architecture!r}: choose one of {ARCHITECTURES}")
    text, vision = text or {}, vision or {}
    configure, build = _BUILD[architecture]
    out = {"out_hidden_size": text.get("hidden_size", _TEXT["hidden_size"])}
    config = configure(
        text_config=_TEXT | _OWN_TEXT[architecture] | text,
        vision_config=_OWN_VISION[architecture] | out | vision,
        **_SPECIAL,
    )
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
        elif ".experts." in name:  # [experts, out, in]
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        else:
            parameter.copy_(noise / parameter[0].numel() ** 0.5)
