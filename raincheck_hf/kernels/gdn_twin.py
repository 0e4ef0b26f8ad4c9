"""A pass of one gated-delta-rule layer in plain PyTorch: the twin of the kernels in ``gdn``.

One token after the other, from the steps of ``suffix_map``. States are fp32, fp64 for fp64 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from raincheck_hf.kernels import suffix_map
from raincheck_hf.kernels.suffix_map import Convolution


@dataclass(frozen=True)
class Memory:
    """What a layer's record points to before a pass; lead tensors have room for W - 1 tokens.

    Attributes:
        prefix_state: [HV, K, V].
        prefix_history: [C, W - 1].
        live_state: [HV, K, V].
        live_history: [C, W - 1].
        lead_state: [HV, K, V].
        phi: [HV, K, K].
        lead_inputs: [C, W - 1].
        lead_g: [W - 1, HV].
        lead_beta: [W - 1, HV].
    """

    prefix_state: Tensor
    prefix_history: Tensor
    live_state: Tensor
    live_history: Tensor
    lead_state: Tensor
    phi: Tensor
    lead_inputs: Tensor
    lead_g: Tensor
    lead_beta: Tensor


@dataclass(frozen=True)
class Lengths:
    """The entries of the header that these layers read."""

    chunk: int
    token: bool
    record: bool
    lead: int
    mapped: bool


def gate(a: Tensor, b: Tensor, log_rate: Tensor, time_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g and beta of projections [T, HV], fp32 or fp64: the layer's formulas and roundings."""
    wide = _wide(a)
    rate = softplus(a.to(wide) + time_bias.to(wide))
    return -log_rate.to(wide).exp() * rate, b.sigmoid().to(wide)


def convolved(conv: Convolution, history: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [T, HV, K] and v [T, HV, V] of ``inputs`` [C, T] behind their history, fp32 or fp64."""
    wide = _wide(inputs)
    window = torch.cat([history, inputs], dim=-1)
    mixed = conv1d(window[None], conv.weight[:, None], conv.bias, groups=len(window))[0]
    mixed = silu(mixed).to(wide).T
    width = conv.key_heads * conv.key_dim
    group = conv.value_heads // conv.key_heads
    q, k = (
        part.reshape(-1, conv.key_heads, conv.key_dim).repeat_interleave(group, 1)
        for part in (mixed[:, :width], mixed[:, width : 2 * width])
    )
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    v = mixed[:, 2 * width :].reshape(-1, conv.value_heads, conv.value_dim)
    return q * conv.key_dim**-0.5, k, v


def layer_pass(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    conv: Convolution,
    log_rate: Tensor,
    time_bias: Tensor,
    memory: Memory,
    lengths: Lengths,
) -> tuple[Tensor, dict[str, Tensor]]:
    """One pass.

    Args:
        mixed: [T, C], the decode row last.
        a: [T, HV].
        b: [T, HV].
        conv: The layer's.
        log_rate: A_log [HV].
        time_bias: dt_bias [HV].
        memory: Before the pass.
        lengths: Of the pass.

    Returns:
        Outputs [T, HV V], zero in unused rows; and what is written of the memory, by name. Of the
        lead's factors only the tokens recorded after the pass.
    """
    g, beta = gate(a, b, log_rate, time_bias)
    out = mixed.new_zeros(len(mixed), conv.value_heads * conv.value_dim)
    written: dict[str, Tensor] = {}
    lead, state, history = lengths.lead, memory.live_state, memory.live_history
    inputs, lead_g, lead_beta = (
        memory.lead_inputs[:, :lead], memory.lead_g[:lead], memory.lead_beta[:lead],
    )  # fmt: skip
    lead_state, phi = memory.lead_state, memory.phi if lengths.mapped else None

    if lengths.token:
        q, k, v = convolved(conv, history, mixed[-1:].T)
        state = suffix_map.delta_step(state, k[0], v[0], g[-1], beta[-1])
        out[-1] = _read(state, q[0]).to(out.dtype)
        history = _slid(history, mixed[-1:].T)
        written |= {"live_state": state, "live_history": history}
        if not lengths.record:
            lead = 0
        elif lead < conv.reach:
            lead += 1
            lead_state = state
            inputs = torch.cat([inputs, mixed[-1:].T], dim=1)
            lead_g, lead_beta = torch.cat([lead_g, g[-1:]]), torch.cat([lead_beta, beta[-1:]])
            written |= {
                "lead_inputs": inputs, "lead_g": lead_g, "lead_beta": lead_beta,
                "lead_state": lead_state,
            }  # fmt: skip
        else:
            if phi is None:
                phi = torch.eye(conv.key_dim).to(state).expand(conv.value_heads, -1, -1)
            phi = suffix_map.map_step(phi, k[0], g[-1], beta[-1])
            written["phi"] = phi

    if not lengths.chunk:
        return out, written
    rows = slice(0, lengths.chunk)
    moved, before = memory.prefix_state, mixed[rows].T
    tokens = zip(*convolved(conv, memory.prefix_history, before), strict=True)
    for row, (q, k, v) in enumerate(tokens):
        moved = suffix_map.delta_step(moved, k, v, g[row], beta[row])
        out[row] = _read(moved, q).to(out.dtype)
    boundary = _slid(memory.prefix_history, before)
    written |= {"prefix_state": moved, "prefix_history": boundary}
    if not lead:
        return out, written

    repaired = moved
    _, keys, values = convolved(conv, boundary, inputs)
    for token in range(lead):
        repaired = suffix_map.delta_step(
            repaired, keys[token], values[token], lead_g[token], lead_beta[token]
        )
    state = repaired if phi is None else suffix_map.join(state, phi, repaired, lead_state)
    if lead < conv.reach:
        history = _slid(boundary, inputs)
    written |= {"lead_state": repaired, "live_state": state, "live_history": history}
    return out, written


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _read(state: Tensor, q: Tensor) -> Tensor:
    """S^T q of every head, side by side [HV V]."""
    return torch.einsum("hkv,hk->hv", state, q).reshape(-1)


def _slid(history: Tensor, inputs: Tensor) -> Tensor:
    """The last of both, as many as the history holds."""
    return torch.cat([history, inputs], dim=1)[:, -history.shape[1] :]
