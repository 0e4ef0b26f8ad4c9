"""The two small models, as configurations of the real architectures, and their first weights."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)

NAMES = ("qwen3_vl", "qwen3_5")
VOCAB = 1024
QWEN3_5_LAYERS = "GFGF"
"""Text layers of the small Qwen3.5: G is a gated delta rule, F is full attention."""

_VISION = {
    "depth": 4,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_heads": 4,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 32 * 32,
    "out_hidden_size": 256,
}
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


def qwen3_vl_config(**tokens: int) -> Qwen3VLConfig:
    """Full attention in every layer, DeepStack into the first two."""
    return Qwen3VLConfig(
        vision_config=_VISION | {"deepstack_visual_indexes": [1, 2]},
        text_config=_TEXT
        | {
            "intermediate_size": 512,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [12, 10, 10],
                "mrope_interleaved": True,
            },
        },
        tie_word_embeddings=True,
        **tokens,
    )


def qwen3_5_config(layers: str = QWEN3_5_LAYERS, **tokens: int) -> Qwen3_5Config:
    """Gated delta-rule layers, G, and layers of full attention, F, in the order given."""
    types = {"G": "linear_attention", "F": "full_attention"}
    return Qwen3_5Config(
        vision_config=_VISION,
        text_config=_TEXT
        | {
            "intermediate_size": 512,
            "num_hidden_layers": len(layers),
            "layer_types": [types[letter] for letter in layers],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [3, 3, 2],
                "mrope_interleaved": True,
            },
        },
        tie_word_embeddings=True,
        **tokens,
    )


def build_model(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    seed: int = 0,
    layers: str = QWEN3_5_LAYERS,
) -> PreTrainedModel:
    """An untrained fp32 model.

    Raises:
        ValueError: `name` is not one of `NAMES`.
    """
    if name not in NAMES:
        raise ValueError(f"the small model {name!r} is unknown; known are {', '.join(NAMES)}")
    torch.manual_seed(seed)
    tokens = {
        f"{key}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for key, token in {
            "image": "image_pad",
            "video": "video_pad",
            "vision_start": "vision_start",
            "vision_end": "vision_end",
        }.items()
    }
    if name == "qwen3_vl":
        model = Qwen3VLForConditionalGeneration(qwen3_vl_config(**tokens))
    else:
        model = Qwen3_5ForConditionalGeneration(qwen3_5_config(layers, **tokens))
    # A token must know where it stands before it can be asked for by its address.
    nn.init.normal_(model.model.visual.pos_embed.weight, std=0.5)
    for layer in model.model.language_model.layers:
        if hasattr(layer, "linear_attn"):
            # Stock decay forgets a board before the question comes; these heads remember it.
            nn.init.uniform_(layer.linear_attn.A_log, -6.0, -2.5)
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    return model.eval()


def save(model: PreTrainedModel, processor: Qwen3VLProcessor, folder: Path) -> None:
    """Write a folder fit for `from_pretrained`.

    The weights are stored as fp16, which halves them and keeps three more bits than bf16 would;
    the configuration says fp32, so that they are computed with in fp32 unless asked otherwise.
    """
    half = copy.deepcopy(model).to(torch.float16)
    half.save_pretrained(folder)
    half.config.dtype = torch.float32
    half.config.save_pretrained(folder)
    processor.save_pretrained(folder)
    for path in Path(folder).iterdir():
        path.chmod(0o644)
