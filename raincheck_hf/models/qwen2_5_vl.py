"""Qwen2.5-VL: full attention everywhere; positions tell the time of a video's frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raincheck_hf.models.base import Adapter


class Qwen25VLAdapter(Adapter):
    """``Qwen2_5_VLForConditionalGeneration``."""

    model_type = "qwen2_5_vl"
    frames_apart = False

    def check(self, model: Any) -> None:
        """Sliding windows count rows by place; rows of D are restored at another place."""
        config = self.text_model(model).config
        windowed = [i for i, kind in enumerate(config.layer_types) if kind != "full_attention"]
        if windowed:
            raise ValueError(
                f"raincheck= needs full attention in every layer, but layers {windowed} of this "
                f"{type(model).__name__} have a sliding window of {config.sliding_window} tokens: "
                "deferred tokens are restored behind the input, where a window would not find "
                "them. Load the model with use_sliding_window=False, or leave out raincheck="
            )

    def timing(self, seconds: Sequence[float] | None) -> dict[str, Any]:
        """See the base class."""
        return {} if seconds is None else {"second_per_grid_ts": list(seconds)}
