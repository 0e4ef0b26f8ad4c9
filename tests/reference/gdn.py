"""The gated delta net, one token at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .parameters import TextParameters, linear, rms_norm


@dataclass(frozen=True)
class GdnRecord:
    """What a token brings into a layer, whatever state it meets there.

    Attributes:
        inputs: Queries, keys and values before the convolution, [C].
        g: Log of the decay, [HV].
        beta: Write strength, [HV].
    """

    inputs: Tensor
    g: Tensor
    beta: Tensor


@dataclass(frozen=True)
class GdnState:
    """A layer's memory after some token. Never changed in place, so sharing one is safe.

    Attributes:
        window: The last convolution inputs, oldest first, [C, kernel].
        recurrent: [HV, K, V].
    """

    window: Tensor
    recurrent: Tensor


def initial_state(text: TextParameters, index: int) -> GdnState:
    """The state before the first token: zeros."""
    config, conv = text.config, text.layers[index]["linear_attn.conv1d.weight"]
    return GdnState(
        window=conv.new_zeros(conv.shape[0], config.linear_conv_kernel_dim),
        recurrent=conv.new_zeros(
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        ),
    )


def record(text: TextParameters, index: int, x: Tensor) -> GdnRecord:
    """Project one normed hidden row, [d]."""
    layer = text.layers[index]
    a = linear(layer, "linear_attn.in_proj_a", x) + layer["linear_attn.dt_bias"]
    return GdnRecord(
        inputs=linear(layer, "linear_attn.in_proj_qkv", x),
        g=-layer["linear_attn.A_log"].exp() * F.softplus(a),
        beta=torch.sigmoid(linear(layer, "linear_attn.in_proj_b", x)),
    )


def shifted(window: Tensor, token: GdnRecord) -> Tensor:
    """The window after one more token: the oldest input leaves, [C, kernel]."""
    return torch.cat([window[:, 1:], token.inputs[:, None]], 1)


def factors(text: TextParameters, index: int, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve a window that ends with the token.

    Returns:
        q and k [HV, K], of length one, and v [HV, V]; each query and key head is repeated
        for the consecutive value heads it serves.
    """
    config = text.config
    mixed = F.silu((window * text.layers[index]["linear_attn.conv1d.weight"][:, 0]).sum(1))
    key_heads, key_size = config.linear_num_key_heads, config.linear_key_head_dim
    keys = key_heads * key_size
    group = config.linear_num_value_heads // key_heads
    q = unit(mixed[:keys].reshape(key_heads, key_size)).repeat_interleave(group, 0)
    k = unit(mixed[keys : 2 * keys].reshape(key_heads, key_size)).repeat_interleave(group, 0)
    v = mixed[2 * keys :].reshape(config.linear_num_value_heads, config.linear_value_head_dim)
    return q, k, v


def step(
    text: TextParameters, index: int, token: GdnRecord, state: GdnState
) -> tuple[Tensor, GdnState]:
    """Consume one token.

        S_t = α_t (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ,   o_t = S_tᵀ q_t / √K

    Returns:
        The heads' outputs o_t, [HV, V], and the new state.
    """
    window = shifted(state.window, token)
    q, k, v = factors(text, index, window)
    q, k, v = q[:, :, None], k[:, :, None], v[:, None, :]
    alpha, beta = token.g.exp()[:, None, None], token.beta[:, None, None]
    old = state.recurrent
    new = alpha * (old - beta * k * (k.mT @ old)) + beta * k * v
    heads = (new.mT @ q)[:, :, 0] / q.shape[1] ** 0.5
    return heads, GdnState(window, new)


def replay(
    text: TextParameters, index: int, tokens: Iterable[GdnRecord], state: GdnState
) -> GdnState:
    """The state after recorded tokens, starting over from `state`.

    Queries, keys and values come anew out of the convolution, whose window at first reaches
    back into `state`; inputs, decays and write strengths are the recorded ones.
    """
    for token in tokens:
        _, state = step(text, index, token, state)
    return state


def output(text: TextParameters, index: int, x: Tensor, heads: Tensor) -> Tensor:
    """Gated norm and output projection.

    Args:
        text: The parameters.
        index: The layer.
        x: The normed hidden row, [d], from which the gate comes.
        heads: Outputs of `step`, [HV, V].

    Returns:
        [d].
    """
    layer = text.layers[index]
    gate = linear(layer, "linear_attn.in_proj_z", x).reshape(heads.shape)
    normed = rms_norm(heads, layer["linear_attn.norm.weight"], text.config.rms_norm_eps)
    return linear(layer, "linear_attn.out_proj", (normed * F.silu(gate)).reshape(-1))


def unit(x: Tensor) -> Tensor:
    """L2-normalise the last dimension."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)
