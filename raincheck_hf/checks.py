"""What ``generate`` cannot do with raincheck, refused before any compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import Cache, DynamicCache

from raincheck_hf.cache import RaincheckCache
from raincheck_hf.models import adapter_for
from raincheck_hf.models.base import ATTENTION_IMPLEMENTATIONS
from raincheck_hf.wrapped import check_wrapping

_STOCK = "leave out raincheck= to run stock generate"


def check_model(model: Any) -> None:
    """Refuse a model that is training, wrapped or attending in a way that raincheck cannot run.

    Raises:
        ValueError: Says what to change.
    """
    if model.training:
        raise ValueError(
            "raincheck= needs a model in evaluation mode; call model.eval() first "
            "(training with an enabled model is stock)"
        )
    used = model.config.get_text_config()._attn_implementation
    if used not in ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"raincheck= supports attn_implementation {' and '.join(ATTENTION_IMPLEMENTATIONS)} "
            f"for the language model, not {used!r}; load the model with "
            'attn_implementation="sdpa", or call model.set_attn_implementation("sdpa")'
        )
    adapter_for(model).check(model)
    check_wrapping(model)


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse arguments of ``generate`` that have no meaning here.

    Raises:
        ValueError: Names the option and the alternative.
    """
    refused = {
        "assistant_model": "assisted decoding",
        "assistant_tokenizer": "assisted decoding",
        "custom_generate": "a custom generation loop",
        "synced_gpus": "synced_gpus",
        "negative_prompt_ids": "classifier-free guidance",
        "negative_prompt_attention_mask": "classifier-free guidance",
        "mm_encoder_outputs": "precomputed vision features",
    }
    for option, what in refused.items():
        if kwargs.get(option) is not None and kwargs[option] is not False:
            raise ValueError(f"raincheck= does not work with {what} ({option}); {_STOCK}")
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "raincheck= needs input_ids, not inputs_embeds: it has to know which tokens are "
            "multimodal and what the conversation already holds"
        )
    for option in ("position_ids", "cache_position"):
        if kwargs.get(option) is not None:
            raise ValueError(f"raincheck= derives {option} itself; leave it out")


def check_generation_config(config: GenerationConfig) -> None:
    """Refuse generation settings that have no meaning here.

    Args:
        config: With everything merged in, as stock ``generate`` would use it.

    Raises:
        ValueError: Names the option and the alternative.
    """
    one = {"num_beams": "beams", "num_return_sequences": "more than one sequence"}
    for option, what in one.items():
        value = getattr(config, option, None)
        if value not in (None, 1):
            raise ValueError(
                f"raincheck= does not support {what} ({option}={value}); "
                f"set {option}=1, or {_STOCK}"
            )
    unset = {
        "cache_implementation": "raincheck brings its own cache",
        "prompt_lookup_num_tokens": "prompt-lookup decoding drafts several tokens",
        "penalty_alpha": "contrastive search needs several candidates",
        "dola_layers": "DoLa needs every layer's logits",
        "prefill_chunk_size": "the initial prefill is one pass",
        "use_mtp": "multi-token prediction drafts several tokens",
        "assistant_early_exit": "assisted decoding drafts several tokens",
        "is_assistant": "assisted decoding drafts several tokens",
    }
    for option, why in unset.items():
        value = getattr(config, option, None)
        if value:
            raise ValueError(
                f"raincheck= does not work with {option}={value!r}: {why}. "
                f"Leave {option} unset, or {_STOCK}"
            )
    if config.guidance_scale not in (None, 1):
        raise ValueError(
            f"raincheck= does not work with guidance_scale={config.guidance_scale}: guidance runs "
            f"the model twice. Leave it unset, or {_STOCK}"
        )
    if config.use_cache is False:
        raise ValueError("raincheck= needs use_cache=True: the deferred tokens live in the cache")
    if config.token_healing:
        raise ValueError("raincheck= does not work with token_healing; leave it unset")
    for option in ("output_attentions", "output_hidden_states"):
        if getattr(config, option, None):
            raise ValueError(
                f"raincheck= does not return {option[7:]}: P and D are not one sequence. "
                f"Leave {option} unset, or {_STOCK}"
            )


def check_ids(input_ids: Any, mask: Any, model: Any) -> Tensor:
    """The input ids, int64 [1, L], without padding.

    Raises:
        TypeError: Not a tensor of integers.
        ValueError: A batch, an empty input, padding, or ids outside the vocabulary.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int64, torch.int32):
        kind = getattr(input_ids, "dtype", type(input_ids).__name__)
        raise TypeError(f"raincheck= needs input_ids as an integer tensor [1, L]; got {kind}")
    if input_ids.ndim != 2 or len(input_ids) != 1:
        raise ValueError(
            f"raincheck= runs one sequence at a time; got input_ids {list(input_ids.shape)}. "
            "Call generate once for each sequence"
        )
    if input_ids.shape[1] == 0:
        raise ValueError("input_ids are empty; a turn needs at least one token")
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"attention_mask must be a tensor [1, n]; got {type(mask).__name__}")
        if mask.ndim != 2 or len(mask) != 1 or mask.shape[1] < input_ids.shape[1]:
            raise ValueError(
                f"attention_mask must be [1, n] with n >= {input_ids.shape[1]}; "
                f"got {list(mask.shape)}"
            )
        if not bool((mask.cpu() == 1).all()):
            raise ValueError(
                "attention_mask has zeros: padding is not supported with raincheck=. "
                "Pass one sequence without padding"
            )
    low, high = (int(bound) for bound in input_ids.cpu().aminmax())
    size = len(model.get_input_embeddings().weight)  # an adapter's embedding has just that
    if low < 0 or high >= size:
        raise ValueError(f"input_ids must be in 0 to {size - 1}; got {low} to {high}")
    return input_ids.long()


def take_cache(cache: Any, model: Any) -> RaincheckCache | None:
    """The RaincheckCache to go on with, or None to start one.

    Raises:
        ValueError: A cache of another class that is not empty, or of another model.
        TypeError: Not a cache.
    """
    if cache is None:
        return None
    if isinstance(cache, RaincheckCache):
        if cache.model is not model:
            raise ValueError(
                "this RaincheckCache belongs to another model; a conversation stays on the model "
                "it began on. Start with RaincheckCache(model)"
            )
        return cache
    if type(cache) is DynamicCache and cache.get_seq_length() == 0:
        return None
    if not isinstance(cache, Cache):
        raise TypeError(f"cache= takes a RaincheckCache; got {type(cache).__name__}")
    raise ValueError(
        f"raincheck= cannot go on from a {type(cache).__name__}; pass the RaincheckCache of an "
        "earlier turn (out.cache), an empty RaincheckCache(model), or nothing"
    )
