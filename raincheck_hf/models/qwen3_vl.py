"""Qwen3-VL: full attention everywhere; DeepStack features enter the first layers."""

from __future__ import annotations

from typing import Any

import torch

from raincheck_hf.buffers import Rows
from raincheck_hf.models.base import Adapter


class Qwen3VLAdapter(Adapter):
    """``Qwen3VLForConditionalGeneration``."""

    model_type = "qwen3_vl"

    def extra_inputs(self, rows: Rows) -> dict[str, Any]:
        """DeepStack rows, cut with the same indices as the embeddings (rule 1)."""
        if not rows.deepstack or not len(rows.deepstack[0]):
            return {}
        mask = torch.zeros(len(rows), dtype=torch.bool, device=rows.visual.device)
        return {
            "visual_pos_masks": mask.index_fill_(0, rows.visual, True)[None],
            "deepstack_visual_embeds": list(rows.deepstack),
        }
