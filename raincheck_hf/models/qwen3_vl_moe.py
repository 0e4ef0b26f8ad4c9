"""Qwen3-VL with experts: a row's experts depend on that row alone, so the passes are the same."""

from __future__ import annotations

from raincheck_hf.models.qwen3_vl import Qwen3VLAdapter


class Qwen3VLMoeAdapter(Qwen3VLAdapter):
    """``Qwen3VLMoeForConditionalGeneration``."""

    model_type = "qwen3_vl_moe"
