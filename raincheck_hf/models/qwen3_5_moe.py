"""Qwen3.5 with experts: a row's experts depend on that row alone, so the passes are the same."""

from __future__ import annotations

from raincheck_hf.models.qwen3_5 import Qwen35Adapter


class Qwen35MoeAdapter(Qwen35Adapter):
    """``Qwen3_5MoeForConditionalGeneration``."""

    model_type = "qwen3_5_moe"
