"""The feed-forward block: SwiGLU, alone or as a mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .parameters import TextParameters, linear


def feed_forward(text: TextParameters, index: int, x: Tensor) -> Tensor:
    """The block of layer `index` on normed rows, [..., d] to [..., d]."""
    if not text.is_mixture(index):
        return swiglu(text.layers[index], "mlp", x)
    rows = x.reshape(-1, x.shape[-1])
    return torch.stack([mixture(text, index, row) for row in rows]).reshape(x.shape)


def swiglu(layer: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """The gated block under the prefix `name`."""
    inner = F.silu(linear(layer, f"{name}.gate_proj", x)) * linear(layer, f"{name}.up_proj", x)
    return linear(layer, f"{name}.down_proj", inner)


def mixture(text: TextParameters, index: int, row: Tensor) -> Tensor:
    """Route one row, [d]: its most probable experts, weighted by their share among themselves.

    Qwen3.5 adds one expert that every row visits, behind a gate of its own.
    """
    layer = text.layers[index]
    probability = linear(layer, "mlp.gate", row).softmax(-1)
    chosen = probability.argsort(descending=True)[: text.config.num_experts_per_tok].tolist()
    total = sum(float(probability[expert]) for expert in chosen)
    out = torch.zeros_like(row)
    for expert in chosen:
        # The first half of the rows makes the gate, the second what it gates.
        gate, up = (layer["mlp.experts.gate_up_proj"][expert] @ row).chunk(2)
        inner = F.silu(gate) * up
        weight = float(probability[expert]) / total
        out = out + weight * (layer["mlp.experts.down_proj"][expert] @ inner)
    if "mlp.shared_expert_gate.weight" in layer:
        open_by = torch.sigmoid(linear(layer, "mlp.shared_expert_gate", row))
        out = out + open_by * swiglu(layer, "mlp.shared_expert", row)
    return out
