"""Full attention, for any number of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .parameters import TextParameters, linear, rms_norm


def rotate(x: Tensor, positions: Tensor, config) -> Tensor:
    """Partial M-RoPE.

    Which frequency turns by which axis is `axes`. Frequency i pairs dimension i with dimension
    i + rotary / 2; dimensions from `rotary` on stay as they are.

    Args:
        x: [n, heads, hd].
        positions: [3, n], temporal, height, width.
        config: The text config.
    """
    rope = config.rope_parameters
    rotary = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
    half = rotary // 2
    axis = axes(half, rope["mrope_section"], rope.get("mrope_interleaved", False))

    positions = positions.to(x.device)
    # Angles are rounded to fp32, as the model rounds them: they belong to its definition.
    exponent = torch.arange(0, rotary, 2, dtype=torch.float32, device=x.device) / rotary
    frequency = 1.0 / rope["rope_theta"] ** exponent
    angles = torch.stack([positions[axis[i]].float() * frequency[i] for i in range(half)], -1)
    angles = angles.to(x.dtype)[:, None, :]
    first, second, rest = x[..., :half], x[..., half:rotary], x[..., rotary:]
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
            rest,
        ],
        -1,
    )


def axes(half: int, sections: list[int], interleaved: bool) -> list[int]:
    """The axis of each frequency: 0 temporal, 1 height, 2 width.

    Interleaved, frequency i is temporal, but i = 1, 4, 7, ... height and i = 2, 5, 8, ... width,
    up to three times their section. Otherwise (Qwen2.5-VL) the sections follow one another.
    """
    if not interleaved:
        return [axis for axis, size in enumerate(sections) for _ in range(size)]
    axis = [0] * half
    for i in range(half):
        if i % 3 in (1, 2) and i < 3 * sections[i % 3]:
            axis[i] = i % 3
    return axis


def project(
    text: TextParameters, index: int, x: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and gate of layer `index`.

    Args:
        text: The parameters.
        index: The layer.
        x: Normed hidden rows, [n, d].
        positions: [3, n].

    Returns:
        q [n, H, hd] and k [n, Hkv, hd], normed where the model does, and rotated, v
        [n, Hkv, hd], and the output gate [n, H * hd] or None.
    """
    layer, config = text.layers[index], text.config
    n, hd, eps = len(x), text.head_dim, config.rms_norm_eps
    q = linear(layer, "self_attn.q_proj", x)
    gate = None
    if text.gated:
        # Each head's queries are followed by its gate.
        q, gate = q.reshape(n, -1, 2, hd).unbind(2)
        gate = gate.reshape(n, -1)
    q = q.reshape(n, -1, hd)
    k = linear(layer, "self_attn.k_proj", x).reshape(n, -1, hd)
    if "self_attn.q_norm.weight" in layer:
        q = rms_norm(q, layer["self_attn.q_norm.weight"], eps)
        k = rms_norm(k, layer["self_attn.k_norm.weight"], eps)
    v = linear(layer, "self_attn.v_proj", x).reshape(n, -1, hd)
    return rotate(q, positions, config), rotate(k, positions, config), v, gate


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Grouped-query attention where row i sees exactly the rows j with `visible[i, j]`.

    Args:
        q: [n, H, hd].
        k: [m, Hkv, hd].
        v: [m, Hkv, hd].
        visible: Bool [n, m].

    Returns:
        [n, H * hd].
    """
    n, heads, hd = q.shape
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) / hd**0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, v).reshape(n, heads * hd)


def output(text: TextParameters, index: int, attended: Tensor, gate: Tensor | None) -> Tensor:
    """Gate the heads where the model does, and project back to [n, d]."""
    if gate is not None:
        attended = attended * torch.sigmoid(gate)
    return linear(text.layers[index], "self_attn.o_proj", attended)
