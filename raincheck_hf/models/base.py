"""What the rest of the package needs to know of an architecture: one adapter object each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from raincheck_hf.buffers import Rows
from raincheck_hf.kernels.suffix_map import Convolution

LayerKind = Literal["attention", "recurrent"]
ATTENTION_IMPLEMENTATIONS = ("sdpa", "eager")


class Adapter:
    """Qwen vision-language models that share Qwen3-VL's outer structure.

    Attributes:
        model_type: ``config.model_type`` of the architecture.
        frames_apart: Whether a video is one run of placeholders a frame, with text between them,
            and not one run in all.
    """

    model_type: str
    frames_apart: bool = True

    def check(self, model: Any) -> None:
        """Refuse what this architecture can be configured to and raincheck cannot run.

        Raises:
            ValueError: Says what is in the way.
        """

    def text_model(self, model: Any) -> Any:
        """The language model without its head."""
        return model.model.language_model

    def layer_kinds(self, model: Any) -> tuple[LayerKind, ...]:
        """The kind of each decoder layer."""
        return tuple("attention" for _ in self.text_model(model).layers)

    def recurrent_modules(self, model: Any) -> dict[int, nn.Module]:
        """Recurrent token mixers by layer index."""
        return {}

    def merge(self, model: Any) -> int:
        """Patches along a side that become one token."""
        return int(model.config.vision_config.spatial_merge_size)

    def special_ids(self, model: Any) -> frozenset[int]:
        """Ids that are markup, not text, beside those that end a message."""
        config = model.config
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        return frozenset(int(getattr(config, name)) for name in names)

    def embed(self, model: Any, ids: Tensor) -> Tensor:
        """[T, d] input embeddings of int64 ids [T], on the embedding's device."""
        table = model.get_input_embeddings()
        device = table.weight.device
        # Offloaded weights are on "meta" until their hook runs; the hook then moves the ids too.
        return table(ids if device.type == "meta" else ids.to(device))

    def positions(
        self,
        model: Any,
        ids: Tensor,
        types: Tensor,
        grids: dict[str, Tensor],
        start: int,
        seconds: Sequence[float] | None = None,
    ) -> Tensor:
        """M-RoPE positions of an input whose first token stands at ``start``, int64 [3, L].

        Args:
            model: The model.
            ids: int64 [L].
            types: int64 [L]: 0 text, 1 image, 2 video.
            grids: By kind, int64 [items, 3] in patches.
            start: Position of the first token.
            seconds: Between temporal patches, of each video; None for the model's default.
        """
        positions, _ = model.model.get_rope_index(
            ids[None],
            mm_token_type_ids=types[None],
            image_grid_thw=grids.get("image"),
            video_grid_thw=grids.get("video"),
            **self.timing(seconds),
        )
        return positions[:, 0] + start

    def timing(self, seconds: Sequence[float] | None) -> dict[str, Any]:
        """What ``get_rope_index`` takes for the timing of videos, where positions tell it."""
        return {}

    def attention_mask(self, model: Any, visible: Tensor | None, embeds: Tensor) -> Any:
        """The mask argument of the text model for bool ``visible`` [T, slots], or for None."""
        if visible is None:
            return None
        implementation = self.text_model(model).config._attn_implementation
        mask = visible[None, None].to(embeds.device)
        if implementation == "sdpa":
            return mask
        lowest = torch.finfo(embeds.dtype).min
        return torch.zeros(mask.shape, dtype=embeds.dtype, device=mask.device).masked_fill(
            ~mask, lowest
        )

    def run_text(self, model: Any, rows: Rows, visible: Tensor | None, cache: Any) -> Tensor:
        """Hidden states [T, d] after the final norm, through the model's own layers."""
        output = self.text_model(model)(
            inputs_embeds=rows.embeds[None],
            position_ids=rows.positions[:, None].to(rows.embeds.device),
            attention_mask=self.attention_mask(model, visible, rows.embeds),
            cache=cache,
            use_cache=True,
            **self.extra_inputs(rows),
        )
        return output.last_hidden_state[0]

    def extra_inputs(self, rows: Rows) -> dict[str, Any]:
        """What only this architecture's text model takes."""
        return {}

    def head(self, model: Any, hidden: Tensor) -> Tensor:
        """Logits [T, vocabulary] of hidden states [T, d]."""
        return model.lm_head(hidden)

    def convolution(self, mixer: Any) -> Convolution:
        """The short convolution of a recurrent mixer."""
        raise NotImplementedError(f"{self.model_type} has no recurrent layers")

    def factors(self, mixer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay g and write strength beta, fp32 [T, HV], of mixer inputs [T, d]."""
        raise NotImplementedError(f"{self.model_type} has no recurrent layers")
