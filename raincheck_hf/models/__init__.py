"""Architectures that Raincheck runs on: one adapter each."""

from __future__ import annotations

from typing import Any

from raincheck_hf.models.base import Adapter
from raincheck_hf.models.qwen2_5_vl import Qwen25VLAdapter
from raincheck_hf.models.qwen3_5 import Qwen35Adapter
from raincheck_hf.models.qwen3_5_moe import Qwen35MoeAdapter
from raincheck_hf.models.qwen3_vl import Qwen3VLAdapter
from raincheck_hf.models.qwen3_vl_moe import Qwen3VLMoeAdapter

_ADAPTERS: dict[str, Adapter] = {
    adapter.model_type: adapter
    for adapter in (
        Qwen25VLAdapter(),
        Qwen3VLAdapter(),
        Qwen3VLMoeAdapter(),
        Qwen35Adapter(),
        Qwen35MoeAdapter(),
    )
}


def supported_architectures() -> list[str]:
    """``config.model_type`` of each supported architecture."""
    return sorted(_ADAPTERS)


def adapter_for(model: Any) -> Adapter:
    """The adapter of a model.

    Raises:
        ValueError: The architecture is not supported; lists those that are.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    adapter = _ADAPTERS.get(model_type or "")
    if adapter is None or not hasattr(model, "lm_head"):
        raise ValueError(
            f"raincheck does not support {type(model).__name__} (model_type {model_type!r}); "
            f"supported: {', '.join(supported_architectures())}, "
            "loaded with AutoModelForImageTextToText"
        )
    return adapter


__all__ = ["Adapter", "adapter_for", "supported_architectures"]
