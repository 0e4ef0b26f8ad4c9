"""Keeping a recurrent (gated delta rule) suffix valid while its prefix grows. Plain PyTorch.

For one value head, with state S [K, V], L2-normalised key k, value v, decay alpha = exp(g) and
write strength beta, a token does::

    S <- alpha (I - beta k k^T) S + beta k v^T

which is affine in S. Over a suffix the linear parts compose to the suffix map Phi [K, K], and the
additive parts do not depend on where the suffix started. So when the prefix checkpoint moves from
S_0 to S'_0, the state after the suffix moves by Phi (S'_0 - S_0): the join (paper section 3.2).

The short convolution in front of the rule (kernel 4) makes the first three suffix tokens read
inputs from before the boundary. They are not covered by Phi; their pre-convolution inputs and
factors are kept and replayed from the moved checkpoint (boundary repair), and Phi covers the rest.

Shapes: C convolution channels (2 HK K + HV V), W convolution width, HK key heads, HV value heads,
K key dim, V value dim, T tokens. States and maps are fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu


@dataclass(frozen=True)
class Convolution:
    """The short convolution of one layer and how its output splits into heads.

    Attributes:
        weight: [C, W], the depthwise kernel.
        bias: [C] or None.
        key_heads: HK.
        key_dim: K.
        value_heads: HV.
        value_dim: V.
    """

    weight: Tensor
    bias: Tensor | None
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int

    @property
    def reach(self) -> int:
        """W - 1: how many earlier inputs a token reads."""
        return self.weight.shape[-1] - 1

    @cached_property
    def taps(self) -> Tensor:
        """The weight's memory as int64 [C] where a channel's taps fill such a word; else itself."""
        weight = self.weight
        fills = weight.shape[-1] * weight.element_size() == 8 and weight.is_contiguous()
        if not fills or weight.data_ptr() % 16:
            return weight
        return weight.detach().view(torch.int64)[:, 0]

    def keys_values(self, history: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens that follow ``history``.

        Args:
            history: [C, W - 1], the pre-convolution inputs before them.
            inputs: [C, T], their own.

        Returns:
            fp32 k [T, HV, K], L2-normalised and repeated for the value heads, and v [T, HV, V].
        """
        window = torch.cat([history, inputs], dim=-1).to(self.weight.dtype)
        channels = window.shape[0]
        mixed = conv1d(window[None], self.weight[:, None], self.bias, groups=channels)[0]
        mixed = silu(mixed).to(inputs.dtype).float().T  # [T, C]
        keys_at, values_at = self.key_heads * self.key_dim, 2 * self.key_heads * self.key_dim
        k = mixed[:, keys_at:values_at].reshape(-1, self.key_heads, self.key_dim)
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        k = k.repeat_interleave(self.value_heads // self.key_heads, dim=1)
        v = mixed[:, values_at:].reshape(-1, self.value_heads, self.value_dim)
        return k, v


def map_step(phi: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Extend the suffix map by one token: alpha (Phi - beta k (k^T Phi)).

    Args:
        phi: fp32 [HV, K, K].
        k: fp32 [HV, K], L2-normalised.
        g: fp32 [HV], log decay.
        beta: fp32 [HV].
    """
    read = torch.einsum("hk,hkj->hj", k, phi)
    update = torch.einsum("hk,hj->hkj", k * beta[:, None], read)
    return g.exp()[:, None, None] * (phi - update)


def delta_step(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One token of the gated delta rule; shapes as ``map_step``, with v [HV, V]."""
    write = torch.einsum("hk,hv->hkv", k * beta[:, None], v)
    return map_step(state, k, g, beta) + write


def replay(
    conv: Convolution, state: Tensor, history: Tensor, inputs: Tensor, g: Tensor, beta: Tensor
) -> Tensor:
    """Run recorded tokens again from another checkpoint (boundary repair).

    Args:
        conv: The layer's convolution.
        state: fp32 [HV, K, V], the checkpoint.
        history: [C, W - 1], pre-convolution inputs before the tokens.
        inputs: [C, T], the tokens' own recorded pre-convolution inputs.
        g: fp32 [T, HV], recorded log decays.
        beta: fp32 [T, HV], recorded write strengths.

    Returns:
        fp32 [HV, K, V], the state after the tokens.
    """
    keys, values = conv.keys_values(history, inputs)
    for k, v, decay, strength in zip(keys, values, g, beta, strict=True):
        state = delta_step(state, k, v, decay, strength)
    return state


def join(live: Tensor, phi: Tensor, moved: Tensor, before: Tensor) -> Tensor:
    """The live state after its checkpoint moved: S_n + Phi (S'_0 - S_0), fp32 [HV, K, V]."""
    return live + phi @ (moved - before)
