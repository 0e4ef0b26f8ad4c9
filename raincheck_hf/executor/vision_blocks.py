"""The blocks of a vision tower: what lies between two matrix products is one launch.

Products are PyTorch's, the activation in the first one's epilogue. The stream of residuals is
written where it is normed: a block leaves its last product to the next one's first norm.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from raincheck_hf.kernels import vision_attention
from raincheck_hf.kernels.segments import block_table
from raincheck_hf.kernels.vision_attention import repeated_attend
from raincheck_hf.kernels.vision_norm import repeated_add_norm
from raincheck_hf.kernels.vision_rope import rotation

# Patches of the longest segment from which the kernel is faster than cuDNN, on an H200.
_KERNEL_FROM = 4096
TILES = vision_attention.Tiles()

_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class Segments:
    """Who attends to whom.

    Attributes:
        lengths: Patches of each segment, one behind the other.
        blocks: The kernel's table of them; None where PyTorch's attention runs.
    """

    lengths: tuple[int, ...]
    blocks: Tensor | None

    @classmethod
    def of(cls, tower: Any, lengths: Sequence[int], device: torch.device) -> Segments:
        """Choose how a tower on ``device`` attends."""
        dim = tower.config.hidden_size // tower.config.num_heads
        dtype = tower.patch_embed.proj.weight.dtype
        by_kernel = (
            max(lengths) >= _KERNEL_FROM
            and vision_attention.made_for(device, dtype)
            and vision_attention.takes(dtype, dim)
            and vision_attention.compiled_rightly(device, dtype, tower.config.num_heads, dim, TILES)
        )
        blocks = block_table(lengths, TILES.rows, device) if by_kernel else None
        return cls(tuple(lengths), blocks)


@dataclass(frozen=True)
class BlocksPass:
    """What the blocks leave.

    Attributes:
        x: [N, d'], behind the last block.
        qkv: [N, 3, H, e] of the last block, queries and keys rotated.
        normaliser: fp32 [H, N], log2 of the sums that its attention divided by; None where
            PyTorch's attention kept them to itself.
        deepstack: One [n, d] a DeepStack layer.
    """

    x: Tensor
    qkv: Tensor
    normaliser: Tensor | None
    deepstack: list[Tensor]


def run_blocks(
    tower: Any, x: Tensor, more: Tensor, tables: tuple[Tensor, Tensor], segments: Segments
) -> BlocksPass:
    """Run all blocks on x + more.

    Args:
        tower: The vision tower.
        x: [N, d'], contiguous.
        more: [N, d'], contiguous, in x's dtype.
        tables: Cosine and sine, fp32 [N, e / 2].
        segments: Of the N patches.
    """
    heads = tower.config.num_heads
    like = x.new_empty(len(x), 3, heads, x.shape[1] // heads)
    rotate = rotation(like, *tables)
    attend = _Attention(like, segments, tower.blocks[0].attn.scaling)
    del like
    add_norm = repeated_add_norm(x)
    taps = list(getattr(tower, "deepstack_visual_indexes", ()))
    last = len(tower.blocks) - 1
    deepstack = []
    with sdpa_kernel(_BACKENDS, set_priority=True):
        for i, block in enumerate(tower.blocks):
            x, h = _normed(add_norm, x, more, block.norm1)
            if i - 1 in taps:
                deepstack.append(tower.deepstack_merger_list[taps.index(i - 1)](x))
            qkv = linear(h, block.attn.qkv.weight, block.attn.qkv.bias).view(len(h), 3, heads, -1)
            rotate(qkv)
            mixed = attend.last(qkv) if i == last else attend(qkv)
            more = linear(mixed, block.attn.proj.weight, block.attn.proj.bias)
            x, h = _normed(add_norm, x, more, block.norm2)
            hidden = _activated(block.mlp.linear_fc1, h)
            more = linear(hidden, block.mlp.linear_fc2.weight, block.mlp.linear_fc2.bias)
    x = x + more
    if last in taps:
        deepstack.append(tower.deepstack_merger_list[taps.index(last)](x))
    return BlocksPass(x, qkv, attend.normaliser, deepstack)


def _normed(
    add_norm: Callable[..., tuple[Tensor, Tensor]], x: Tensor, more: Tensor, norm: nn.LayerNorm
) -> tuple[Tensor, Tensor]:
    return add_norm(x, more, norm.weight, norm.bias, norm.eps)


def _activated(layer: nn.Linear, h: Tensor) -> Tensor:
    """gelu(layer(h)), tanh's form."""
    if h.is_cuda and h.dtype != torch.float32:
        # In the product's epilogue, with a tanh that is exact enough for 16 bits. On a CPU this is
        # the form with erf.
        return torch._addmm_activation(layer.bias, h, layer.weight.t(), use_gelu=True)
    return gelu(linear(h, layer.weight, layer.bias), approximate="tanh")


class _Attention:
    """Attention within each segment, of joint projections like one, [N, d'].

    Attributes:
        normaliser: What `last` noted, see `BlocksPass`.
    """

    def __init__(self, like: Tensor, segments: Segments, scale: float) -> None:
        self.normaliser: Tensor | None = None
        self._run: Callable[..., Tensor] = partial(
            attend_by_runs, lengths=segments.lengths, scale=scale
        )
        if segments.blocks is not None:
            make = partial(repeated_attend, like, segments.blocks, scale, tiles=TILES)
            self._run, self._noting = make(), make(normalises=True)
            self.normaliser = like.new_empty(like.shape[2], len(like), dtype=torch.float32)

    def __call__(self, qkv: Tensor) -> Tensor:
        return self._run(qkv)

    def last(self, qkv: Tensor) -> Tensor:
        """The same of the last block, noting what selectors may ask about."""
        if self.normaliser is None:
            return self._run(qkv)
        return self._noting(qkv, normaliser=self.normaliser)


def attend_by_runs(qkv: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """PyTorch's attention within each segment, [N, d']; runs of equal segments share a launch."""
    parts, start = [], 0
    for length, run in itertools.groupby(lengths):
        count = len(list(run))
        rows = qkv[start : start + count * length].unflatten(0, (count, length))
        q, k, v = rows.permute(2, 0, 3, 1, 4).unbind(0)
        out = scaled_dot_product_attention(q, k, v, scale=scale)
        parts.append(out.transpose(1, 2).reshape(count * length, -1))
        start += count * length
    return parts[0] if len(parts) == 1 else torch.cat(parts)
