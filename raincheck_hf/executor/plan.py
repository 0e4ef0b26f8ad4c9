"""A model's own weights, arranged for the lean forward; and whether it can be arranged at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raincheck_hf.executor.plain import Census, unplain
from raincheck_hf.kernels.gdn import Gates
from raincheck_hf.kernels.linear import Norm
from raincheck_hf.kernels.suffix_map import Convolution
from raincheck_hf.models import adapter_for

# Architectures that the kernels know, and what their norms add to the weight.
_NORM_OFFSET = {"qwen3_vl": 0, "qwen3_5": 1}

# By mixer: its linear layers, and its other modules.
_MIXERS = {
    "self_attn": (("q_proj", "k_proj", "v_proj", "o_proj"), ("q_norm", "k_norm")),
    "linear_attn": (("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"), ("norm",)),
}


@dataclass(frozen=True)
class Attention:
    """A full attention layer's mixer.

    Attributes:
        inputs: Weights of q, k and v; q's rows are [query | gate] a head where ``gated``.
        output: Weight of o.
        q_norm, k_norm: [dim] each.
        heads, key_heads, dim: Query heads, key heads and their width.
        gated: Whether sigmoid(gate) multiplies the result.
        scale: Of the scores.
    """

    inputs: tuple[Tensor, ...]
    output: Tensor
    q_norm: Tensor
    k_norm: Tensor
    heads: int
    key_heads: int
    dim: int
    gated: bool
    scale: float


@dataclass(frozen=True)
class Recurrent:
    """A gated delta rule layer's mixer.

    Attributes:
        inputs: Weights of qkv, z, b and a.
        output: Weight of the output projection.
        conv, gates: What the rule needs beside them.
        norm, eps: Of the gated norm, [V].
    """

    inputs: tuple[Tensor, ...]
    output: Tensor
    conv: Convolution
    gates: Gates
    norm: Tensor
    eps: float


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    before: Norm
    mixer: Attention | Recurrent
    between: Norm
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Plan:
    """All that the lean forward reads of a model. Tensors are the parameters' own memory.

    Attributes:
        layers: In order.
        final: The norm in front of the head.
        head: [vocabulary, d].
        table: [vocabulary, d], input embeddings.
        frequencies, axis: fp32 and int32 [R]: rotary frequencies, and which position each uses.
        scaling: Of cosine and sine.
        deepstack: How many layers take DeepStack features.
        census: Tells whether a parameter or a module was replaced since.
    """

    layers: tuple[Layer, ...]
    final: Norm
    head: Tensor
    table: Tensor
    frequencies: Tensor
    axis: Tensor
    scaling: float
    deepstack: int
    census: Census

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    @property
    def width(self) -> int:
        """d."""
        return self.table.shape[1]


def why_not(model: Any, demanded: bool) -> str | None:
    """Why the lean forward should not stand in for the model's own layers; None where it should.

    Args:
        model: The model.
        demanded: Whether the user asked for it. It runs in fp32 too, but no faster than PyTorch.
    """
    adapter = adapter_for(model)
    if adapter.model_type not in _NORM_OFFSET:
        return f"{type(model).__name__} has no fused kernels"
    parameters = list(adapter.text_model(model).parameters())
    devices = {p.device for p in (*parameters, model.lm_head.weight)}
    if len(devices) != 1:
        return f"the weights are on several devices ({', '.join(sorted(map(str, devices)))})"
    device = devices.pop()
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    wrapped = next(_wrapped(model, adapter), None)
    if wrapped is not None:
        return wrapped
    dtypes = {module.weight.dtype for _, module in _linears(model, adapter)}
    known = {torch.bfloat16, torch.float16, *([torch.float32] if demanded else [])}
    if len(dtypes) != 1 or not dtypes <= known:
        return f"its linear weights are {', '.join(sorted(map(str, dtypes)))}"
    config = adapter.text_model(model).config
    if config.rope_parameters.get("rope_type", "default") != "default":
        return f"its rotary embedding is of type {config.rope_parameters['rope_type']!r}"
    return None


def make_plan(model: Any) -> Plan:
    """Arrange a model's weights; ``why_not`` said None."""
    adapter = adapter_for(model)
    text = adapter.text_model(model)
    rotary = text.rotary_emb
    offset = _NORM_OFFSET[adapter.model_type]
    half = len(rotary.inv_freq)
    axis = torch.zeros(half, dtype=torch.int32)
    for dim, first in ((1, 1), (2, 2)):
        axis[first : rotary.mrope_section[dim] * 3 : 3] = dim
    head = model.lm_head.weight.detach()
    return Plan(
        layers=tuple(_layer(adapter, layer, offset) for layer in text.layers),
        final=_norm(text.norm, offset),
        head=head,
        table=text.embed_tokens.weight.detach(),
        frequencies=rotary.inv_freq.float().to(head.device),
        axis=axis.to(head.device),
        scaling=float(rotary.attention_scaling),
        deepstack=len(getattr(model.config.vision_config, "deepstack_visual_indexes", ())),
        census=Census(
            text, model.lm_head, held=((model, "lm_head"), (model.model, "language_model"))
        ),
    )


def _layer(adapter: Any, layer: Any, offset: int) -> Layer:
    mixer = _attention(layer.self_attn) if hasattr(layer, "self_attn") else None
    mlp = layer.mlp
    return Layer(
        before=_norm(layer.input_layernorm, offset),
        mixer=mixer or _recurrent(adapter, layer.linear_attn),
        between=_norm(layer.post_attention_layernorm, offset),
        gate=mlp.gate_proj.weight.detach(),
        up=mlp.up_proj.weight.detach(),
        down=mlp.down_proj.weight.detach(),
    )


def _norm(module: Any, offset: int) -> Norm:
    eps = getattr(module, "variance_epsilon", None)
    return Norm(module.weight.detach(), offset, module.eps if eps is None else eps)


def _attention(module: Any) -> Attention:
    dim = module.head_dim
    key_heads = module.k_proj.out_features // dim
    heads = key_heads * module.num_key_value_groups
    return Attention(
        inputs=tuple(
            part.weight.detach() for part in (module.q_proj, module.k_proj, module.v_proj)
        ),
        output=module.o_proj.weight.detach(),
        q_norm=module.q_norm.weight.detach(),
        k_norm=module.k_norm.weight.detach(),
        heads=heads,
        key_heads=key_heads,
        dim=dim,
        gated=module.q_proj.out_features == 2 * heads * dim,
        scale=float(module.scaling),
    )


def _recurrent(adapter: Any, module: Any) -> Recurrent:
    names, _ = _MIXERS["linear_attn"]
    *inputs, output = (getattr(module, name).weight.detach() for name in names)
    return Recurrent(
        inputs=tuple(inputs),
        output=output,
        conv=adapter.convolution(module),
        gates=Gates(module.A_log.detach(), module.dt_bias.detach()),
        norm=module.norm.weight.detach(),
        eps=module.norm.variance_epsilon,
    )


def _linears(model: Any, adapter: Any) -> Iterator[tuple[str, Any]]:
    """Every linear layer that the lean forward stands in for, by name."""
    for i, layer in enumerate(adapter.text_model(model).layers):
        for mixer, (names, _) in _MIXERS.items():
            for name in names if hasattr(layer, mixer) else ():
                yield f"layers.{i}.{mixer}.{name}", getattr(getattr(layer, mixer), name)
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield f"layers.{i}.mlp.{name}", getattr(layer.mlp, name)
    yield "lm_head", model.lm_head


def _wrapped(model: Any, adapter: Any) -> Iterator[str]:
    """What makes a module's own forward necessary."""
    mixers = set(map(id, adapter.recurrent_modules(model).values()))  # bound by enable_raincheck
    allowed = (nn.Linear, nn.Embedding, nn.Conv1d)
    yield from unplain(adapter.text_model(model), "the language model", allowed, mixers)
    yield from unplain(model.lm_head, "lm_head", allowed)
    for i, layer in enumerate(adapter.text_model(model).layers):
        if type(layer.mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
            yield f"layers.{i}.mlp.act_fn is a {type(layer.mlp.act_fn).__name__}, not SiLU"
    for name, module in _linears(model, adapter):
        if type(module) is not nn.Linear:
            yield f"{name} is a {type(module).__name__}, not a plain linear layer"
        elif module.bias is not None:
            yield f"{name} has a bias"
        elif not module.weight.is_contiguous():
            yield f"{name}.weight is not contiguous"
