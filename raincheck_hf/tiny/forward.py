"""The small models' forward pass, batched for training.

The models' own modules do the work; only the loops around them differ from stock. All pictures of
a batch have one size, so vision attention runs over them as one batch, and position tables are
made once per plan. Legend: B rows, L tokens, V visual tokens a row, N boards, T patches a board.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule
from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
)

from raincheck_hf.tiny import boards
from raincheck_hf.tiny.lessons import Lesson, Plan

CHUNK = 64
"""Tokens that the delta rule takes at a time."""


@dataclass
class States:
    """What the losses look at. H is the hidden size.

    Attributes:
        layers: the output of each text layer, [B, L, H].
        final: the last one, normalised, [B, L, H].
    """

    layers: list[Tensor]
    final: Tensor


class Handwriting(nn.Module):
    """Pictures of cells on the device, redrawn with random distortions for every batch.

    Args:
        versions: how many distorted versions of each picture a draw holds.
    """

    def __init__(self, versions: int = 3):
        super().__init__()
        self._versions = versions
        self.register_buffer("cells", torch.from_numpy(boards.enlarged()).float() / 255)

    def draw(self, index: Tensor, distort: bool) -> tuple[Tensor, Tensor]:
        """Patches of a set of pictures, and where each cell finds its own among them.

        Args:
            index: int64 [...], a picture's number for each cell.
            distort: turn, scale, shear, shift and fade at random.

        Returns:
            patches, [M, 4, 256], normalised as the image processor does; and int64 [...], which
            of those M a cell shows.
        """
        cells, device = self.cells, self.cells.device
        if distort:
            cells = self.cells[: boards.FIRST_HELD_OUT].repeat(self._versions, 1, 1)
            cells = _distorted(cells)
            version = torch.randint(self._versions, index.shape, device=device)
            index = index + boards.FIRST_HELD_OUT * version
        half = boards.CELL // 2
        patches = cells.unfold(1, half, half).unfold(2, half, half).reshape(-1, 4, half * half)
        return patches * 2 - 1, index


def _distorted(cells: Tensor) -> Tensor:
    count, device = len(cells), cells.device

    def spread(width: float) -> Tensor:
        return (torch.rand(count, device=device) * 2 - 1) * width

    turn, shear = spread(0.22), spread(0.2)
    wide, high = 1 + spread(0.15), 1 + spread(0.15)
    matrix = torch.stack(
        [
            torch.stack([turn.cos() * wide, shear - turn.sin(), spread(0.15)], -1),
            torch.stack([turn.sin(), turn.cos() * high, spread(0.15)], -1),
        ],
        1,
    )
    grid = F.affine_grid(matrix, [count, 1, *cells.shape[1:]], align_corners=False)
    moved = F.grid_sample(cells[:, None], grid, align_corners=False)[:, 0]
    noise = torch.randn_like(moved) * torch.rand(count, 1, 1, device=device) * 0.08
    moved = (moved * (1 + spread(0.15))[:, None, None] + noise).clamp(0, 1)
    plain = torch.rand(count, 1, 1, device=device) < 0.25
    return torch.where(plain, cells, moved)


class BatchedForward(nn.Module):
    """Runs a small model over lessons.

    Args:
        model: one of the small models.
        compiled: compile the layers, which fuses most of their small operations.
    """

    def __init__(self, model: PreTrainedModel, compiled: bool = False):
        super().__init__()
        self.model = model.model
        self.visual, self.text = model.model.visual, model.model.language_model
        # Delta-rule layers stay eager: the rule's loop over chunks takes most of their time.
        self._attend, self._look = _attend, _look
        if compiled:
            self._attend = torch.compile(_attend, dynamic=True)
            self._look = torch.compile(_look, dynamic=True)
        self._tables = lru_cache(maxsize=64)(self._make_tables)

    def forward(self, lesson: Lesson, patches: Tensor, index: Tensor) -> States:
        """Run over a lesson.

        Args:
            lesson: on the model's device.
            patches: [M, 4, 256], from `Handwriting.draw`.
            index: int64 [B, V], which of the M stands behind each visual token.
        """
        batch = len(index)
        seen, deep = self._see(lesson.plan, patches, index)
        hidden = self.text.embed_tokens(lesson.ids)
        seen = seen.view(batch, -1, hidden.shape[-1]).to(hidden.dtype)
        hidden = hidden.index_copy(1, lesson.visual, seen)
        cos, sin = (part[:, lesson.sequence] for part in self._rope(lesson))
        back = lesson.sequence.argsort()
        hidden, visual, layers = hidden[:, lesson.sequence], back[lesson.visual], []
        for number, layer in enumerate(self.text.layers):
            hidden = self._layer(layer, hidden, (cos.to(hidden.dtype), sin.to(hidden.dtype)))
            if number < len(deep):
                extra = deep[number].view(batch, -1, hidden.shape[-1])
                hidden = hidden.index_add(1, visual, extra.to(hidden.dtype))
            layers.append(hidden[:, back])
        return States(layers, self.text.norm(layers[-1]))

    def _layer(self, layer: nn.Module, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        if not hasattr(layer, "linear_attn"):
            return self._attend(layer, hidden, rope)
        query, key, value, decay, write = _before_rule(layer, hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            out, _ = torch_chunk_gated_delta_rule(
                query, key, value, decay, write, CHUNK, use_qk_l2norm_in_kernel=True
            )
        return _after_rule(layer, hidden, out)

    def _see(self, plan: Plan, patches: Tensor, index: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Merged tokens, [B·V, H], and DeepStack's, for every board of the batch."""
        visual, size = self.visual, plan.rows * plan.cols
        places, weights, cos, sin = self._tables(plan.rows, plan.cols, patches.device)
        conv = visual.patch_embed.proj
        # Pictures are grey and still, so the kernel can be summed over colour and time.
        kernel = conv.weight.sum((1, 2)).flatten(1)
        flat = F.linear(patches, kernel, conv.bias)[index.view(-1, size)]
        where = (visual.pos_embed(places) * weights[..., None]).sum(1)
        hidden = flat.flatten(1, 2) + where
        deep = []
        for number, block in enumerate(visual.blocks):
            hidden = self._look(block, hidden, cos, sin)
            if number in getattr(visual, "deepstack_visual_indexes", ()):
                merger = visual.deepstack_merger_list[len(deep)]
                deep.append(merger(hidden.flatten(0, 1)))
        return visual.merger(hidden.flatten(0, 1)), deep

    def _make_tables(self, rows: int, cols: int, device: torch.device):
        visual = self.visual
        merge = visual.config.spatial_merge_size
        grid = torch.tensor([[1, rows * merge, cols * merge]], device=device)
        places, weights = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        rope = visual.rotary_pos_emb(weights, get_vision_position_ids(grid, merge))
        return places, weights, *rope

    def _rope(self, lesson: Lesson) -> tuple[Tensor, Tensor]:
        plan, config = lesson.plan, self.model.config
        ids, merge = lesson.ids[:1].cpu(), self.visual.config.spatial_merge_size
        grids = torch.tensor([[1, plan.rows * merge, plan.cols * merge]] * plan.boards)
        kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        key = "image_grid_thw" if plan.video_fps is None else "video_grid_thw"
        positions, _ = self.model.get_rope_index(ids, kinds, **{key: grids})
        positions = positions.to(lesson.ids.device, non_blocking=True)
        return self.text.rotary_emb(self.text.embed_tokens.weight, positions)


def _attend(layer: nn.Module, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """A text layer of full attention."""
    return layer(hidden, position_embeddings=rope, attention_mask=None)


def _look(block: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A vision block over a batch of equal pictures, [B·N, T, width]."""
    attention = block.attn
    count, patches, width = hidden.shape
    shape = (count, patches, 3, attention.num_heads, width // attention.num_heads)
    query, key, value = attention.qkv(block.norm1(hidden)).view(shape).unbind(2)
    query, key = apply_rotary_pos_emb_vision(query, key, cos, sin)
    heads = (part.transpose(1, 2) for part in (query, key, value))
    out = F.scaled_dot_product_attention(*heads).transpose(1, 2)
    hidden = hidden + attention.proj(out.reshape(hidden.shape))
    return hidden + block.mlp(block.norm2(hidden))


def _before_rule(layer: nn.Module, hidden: Tensor) -> tuple[Tensor, ...]:
    """Query, key, value, log decay and write strength of a gated delta-rule layer, in fp32."""
    net, batch, length = layer.linear_attn, *hidden.shape[:2]
    hidden = layer.input_layernorm(hidden)
    mixed = net.in_proj_qkv(hidden)
    kernel, reach = net.conv1d.weight[:, 0], net.conv_kernel_size - 1
    padded = F.pad(mixed, (0, 0, reach, 0))
    mixed = padded[:, :length] * kernel[:, 0]
    for tap in range(1, reach + 1):
        mixed = mixed + padded[:, tap : tap + length] * kernel[:, tap]
    parts = F.silu(mixed).float().split([net.key_dim, net.key_dim, net.value_dim], -1)
    widths = (net.head_k_dim, net.head_k_dim, net.head_v_dim)
    query, key, value = (
        part.reshape(batch, length, -1, width) for part, width in zip(parts, widths, strict=True)
    )
    decay = -net.A_log.exp() * F.softplus(net.in_proj_a(hidden).float() + net.dt_bias)
    return query, key, value, decay, net.in_proj_b(hidden).float().sigmoid()


def _after_rule(layer: nn.Module, hidden: Tensor, out: Tensor) -> Tensor:
    """The rest of that layer; `out`, [B, L, HV, V], is what the rule read."""
    net = layer.linear_attn
    gate = net.in_proj_z(layer.input_layernorm(hidden)).reshape(-1, net.head_v_dim)
    out = net.norm(out.reshape(-1, net.head_v_dim), gate).view(*hidden.shape[:2], -1)
    hidden = hidden + net.out_proj(out)
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))
