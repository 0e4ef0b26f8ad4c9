"""The text model's parameters, read once, in the dtype of the simulation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Qwen3.5 stores these norm weights minus one; its gated norm is stored as it is.
_ZERO_CENTRED = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")

# By the text config's type: whether the model is of Qwen3.5's kind, with an output gate on
# attention and norm weights stored minus one.
_FAMILIES = {
    "qwen2_5_vl_text": False,
    "qwen3_vl_text": False,
    "qwen3_vl_moe_text": False,
    "qwen3_5_text": True,
    "qwen3_5_moe_text": True,
}


@dataclass(frozen=True)
class TextParameters:
    """What the maths needs of a Qwen2.5-VL, Qwen3-VL or Qwen3.5 text model.

    Attributes:
        config: The text config.
        embed: Token embeddings, [vocab, d].
        layers: For each layer its parameters by name, such as `self_attn.q_proj.weight`.
        norm: Weight of the final norm, [d].
        head: Weight of the LM head, [vocab, d].
        gated: Whether attention has Qwen3.5's output gate.
    """

    config: object
    embed: Tensor
    layers: list[dict[str, Tensor]]
    norm: Tensor
    head: Tensor
    gated: bool

    @classmethod
    def read(cls, model: torch.nn.Module, dtype: torch.dtype) -> TextParameters:
        """Read a `...ForConditionalGeneration`; the parameters are copied and detached."""
        config = model.config.text_config
        if config.model_type not in _FAMILIES:
            raise ValueError(f"no reference for {config.model_type!r}, only for {list(_FAMILIES)}")
        if config.hidden_act != "silu" or config.rope_parameters["rope_type"] != "default":
            raise ValueError("the reference knows SiLU and the default rotary embedding only")
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise ValueError("the reference knows no sliding window")
        qwen3_5 = _FAMILIES[config.model_type]

        def copy(parameter: Tensor) -> Tensor:
            return parameter.detach().to(dtype, copy=True)

        def norm_weight(parameter: Tensor) -> Tensor:
            return copy(parameter) + 1 if qwen3_5 else copy(parameter)

        text = model.model.language_model
        layers = []
        for layer in text.layers:
            named = {}
            for name, parameter in layer.named_parameters():
                is_norm = any(part in _ZERO_CENTRED for part in name.split("."))
                named[name] = norm_weight(parameter) if is_norm else copy(parameter)
            layers.append(named)
        return cls(
            config=config,
            embed=copy(text.embed_tokens.weight),
            layers=layers,
            norm=norm_weight(text.norm.weight),
            head=copy(model.lm_head.weight),
            gated=qwen3_5,
        )

    def is_recurrent(self, index: int) -> bool:
        """Whether layer `index` is a gated delta net; the others are full attention."""
        return "linear_attn.A_log" in self.layers[index]

    def is_mixture(self, index: int) -> bool:
        """Whether the feed-forward block of layer `index` is a mixture of experts."""
        return "mlp.gate.weight" in self.layers[index]

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        size = getattr(self.config, "head_dim", None)
        return size or self.config.hidden_size // self.config.num_attention_heads

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and LM head, [..., d] to [..., vocab]."""
        return rms_norm(hidden, self.norm, self.config.rms_norm_eps) @ self.head.T


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale the last dimension of `x` to root mean square one, then by `weight`."""
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def linear(layer: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Apply the projection `name` of a layer to the last dimension of `x`."""
    out = x @ layer[f"{name}.weight"].T
    bias = layer.get(f"{name}.bias")
    return out if bias is None else out + bias
