"""Qwen3.5: gated delta rule (GDN) layers with full attention layers between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from raincheck_hf.kernels.suffix_map import Convolution
from raincheck_hf.models.base import Adapter, LayerKind


class Qwen35Adapter(Adapter):
    """``Qwen3_5ForConditionalGeneration``."""

    model_type = "qwen3_5"

    def layer_kinds(self, model: Any) -> tuple[LayerKind, ...]:
        """From the config's layer types."""
        types = self.text_model(model).config.layer_types
        return tuple("recurrent" if kind == "linear_attention" else "attention" for kind in types)

    def recurrent_modules(self, model: Any) -> dict[int, nn.Module]:
        """The GDN mixers."""
        layers = self.text_model(model).layers
        kinds = self.layer_kinds(model)
        return {i: layers[i].linear_attn for i, kind in enumerate(kinds) if kind == "recurrent"}

    def attention_mask(self, model: Any, visible: Tensor | None, embeds: Tensor) -> Any:
        """One entry a layer type; recurrent layers see no mask without padding."""
        mask = super().attention_mask(model, visible, embeds)
        return {"full_attention": mask, "linear_attention": None}

    def convolution(self, mixer: Any) -> Convolution:
        """See the base class."""
        return Convolution(
            weight=mixer.conv1d.weight.squeeze(1),
            bias=mixer.conv1d.bias,
            key_heads=mixer.num_k_heads,
            key_dim=mixer.head_k_dim,
            value_heads=mixer.num_v_heads,
            value_dim=mixer.head_v_dim,
        )

    def factors(self, mixer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The model's own formulas, in its own precision, then fp32."""
        beta = mixer.in_proj_b(hidden).sigmoid().float()
        rate = softplus(mixer.in_proj_a(hidden).float() + mixer.dt_bias)
        return -torch.exp(mixer.A_log.float()) * rate, beta
