"""The lean forward for many rows: P, and what is left of D after the answer.

Matrix products and attention are PyTorch's, which are at their best here; what lies between them
is fused. Buffers last one pass, so that passes on two streams do not meet. A pass whose places the
descriptor alone knows attends by kernel, and can be captured (`captured.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from raincheck_hf.buffers import KeyValueBuffer, Rows
from raincheck_hf.executor.described import Descriptor
from raincheck_hf.executor.plan import Attention, Plan, Recurrent
from raincheck_hf.executor.steps import split_heads
from raincheck_hf.kernels import descriptor as d
from raincheck_hf.kernels import gdn
from raincheck_hf.kernels.attention_kernels import region_attention
from raincheck_hf.kernels.attention_plan import plan_attention, scratch_size
from raincheck_hf.kernels.linear import Norm, Scratch, linear
from raincheck_hf.kernels.norm import gated_rms_norm, repeated_rms_norm
from raincheck_hf.kernels.pointwise import repeated_silu_mul
from raincheck_hf.kernels.rope_kernels import repeated_rotate_and_write, rope_table


class Prefill:
    """One pass of many rows: chunk rows, and perhaps a decode row behind them."""

    def __init__(
        self, plan: Plan, about: Descriptor, rows: Rows, slot: int | None, token: bool
    ) -> None:
        """Prepare a pass.

        Args:
            plan: The model.
            about: The pass's descriptor, already on its way to the device.
            rows: All input rows.
            slot: Slot of the first chunk row; they see every slot before it. None where the
                descriptor alone says it, and how many rows are in use: what is launched is the
                same for all passes of so many rows then, and can be captured.
            token: Whether the last row is a decode row; not without a slot.
        """
        self._plan, self._about, self._rows, self._slot = plan, about, rows, slot
        self._chunk = len(rows) - token
        count, device = len(rows), plan.device
        half, inner = len(plan.frequencies), len(plan.layers[0].gate)
        self._normed = rows.embeds.new_empty(count, plan.width)
        self._gate, self._up = (rows.embeds.new_empty(count, inner) for _ in range(2))
        self._norms: dict[tuple[int, float], Callable[[Tensor, Tensor], None]] = {}
        self._silu_mul = repeated_silu_mul(self._gate, self._up, self._gate)
        self._cos, self._sin = (
            torch.empty(count, half, dtype=torch.float32, device=device) for _ in range(2)
        )
        rope_table(
            rows.positions.contiguous(), about.header, plan.frequencies, plan.axis, plan.scaling,
            self._cos, self._sin, plan.dtype, capacity=self._chunk,
        )  # fmt: skip
        self._attention: _AttentionRows | None = None
        self._workspace: Any = None

    def run(self, buffers: Mapping[int, KeyValueBuffer], wants_logits: bool) -> Tensor | None:
        """Run the layers; logits [1, vocabulary] of the last row, if wanted."""
        plan, rows = self._plan, self._rows
        x = rows.embeds
        deepstack = rows.deepstack if rows.deepstack and len(rows.deepstack[0]) else ()
        for i, layer in enumerate(plan.layers):
            # Of the last layer only the last row is read; its keys and states are made for all.
            last = i == len(plan.layers) - 1 and i >= len(deepstack)
            mixed = self._mix(i, self._norm(x, layer.before), buffers.get(i))
            if last and not wants_logits:
                return None
            if last:
                x, mixed = self._last_of(x), self._last_of(mixed)
            x = torch.addmm(x, mixed, layer.mixer.output.T)
            gate, up = self._gate[: len(x)], self._up[: len(x)]
            h = self._norm(x, layer.between)
            torch.mm(h, layer.gate.T, out=gate)
            torch.mm(h, layer.up.T, out=up)
            if last:
                repeated_silu_mul(gate, up, gate)(gate, up, gate)
            else:
                self._silu_mul(gate, up, gate)
            x = torch.addmm(x, gate, layer.down.T)
            if i < len(deepstack):
                x.index_add_(0, rows.visual, deepstack[i].to(x.dtype))
        if not wants_logits:
            return None
        logits = x.new_empty(1, len(plan.head))
        row = x if len(x) == 1 else self._last_of(x)
        linear(row, [plan.head], logits, Scratch(plan.device), norm=plan.final)
        return logits

    def _last_of(self, x: Tensor) -> Tensor:
        """[1, ...], of the last row in use."""
        if self._slot is not None:
            return x[-1:]
        count = self._about.header[d.CHUNK.value : d.CHUNK.value + 1]
        return x.index_select(0, count - 1)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        out = self._normed[: len(x)]
        if len(x) != len(self._normed):
            repeated_rms_norm(out, norm.offset, norm.eps)(x, norm.weight)
            return out
        key = norm.offset, norm.eps
        if key not in self._norms:
            self._norms[key] = repeated_rms_norm(out, *key)
        self._norms[key](x, norm.weight)
        return out

    def _mix(self, i: int, h: Tensor, buffer: KeyValueBuffer | None) -> Tensor:
        mixer, record = self._plan.layers[i].mixer, self._about.records[i]
        if isinstance(mixer, Recurrent):
            return self._recur(mixer, h, record)
        if self._attention is None:
            self._attention = _AttentionRows(self, mixer, self._plan.layers[i].before)
        return self._attention.run(mixer, h, record, buffer)

    def _recur(self, mixer: Recurrent, h: Tensor, record: Tensor) -> Tensor:
        qkv, z_weight, *gates = mixer.inputs
        # The kernels have a decode row behind the chunk, used or not.
        mixed, b, a = (self._with_decode_row(h, weight) for weight in (qkv, *gates))
        z = h @ z_weight.T
        out = z.new_empty(self._chunk + 1, z.shape[1])
        conv, header = mixer.conv, self._about.header
        if self._workspace is None:
            self._workspace = gdn.Workspace.allocate(conv, self._chunk)
        gdn.prepare(mixed, a, b, out, conv, mixer.gates, header, record, self._workspace)
        gdn.scan(out, conv, header, record, self._workspace)
        out = out[: len(h)]
        gated_rms_norm(out, mixer.norm, z, mixer.eps, out)
        return out

    def _with_decode_row(self, h: Tensor, weight: Tensor) -> Tensor:
        out = h.new_empty(self._chunk + 1, len(weight))
        torch.mm(h, weight.T, out=out[: len(h)])
        return out


class _AttentionRows:
    """Buffers of the attention layers of one pass, which have one shape and run one by one."""

    def __init__(self, work: Prefill, mixer: Attention, norm: Norm) -> None:
        self._slot, self._chunk, self._header = work._slot, work._chunk, work._about.header
        new, count = work._rows.embeds.new_empty, len(work._rows)
        # The attention kernel has a decode row behind the chunk, used or not.
        room = count + (self._slot is None)
        whole = [new(room, len(weight)) for weight in mixer.inputs]
        self._parts = [part[:count] for part in whole]
        q, k, v = whole
        q, k, v, self._gate = split_heads(q, k, v, mixer)
        q, k, v = q[:count], k[:count], v[:count]
        self._room = new(room, mixer.heads, mixer.dim)
        self._turned = self._room[:count]
        self._rotate = repeated_rotate_and_write(
            q, k, v, work._cos, work._sin, self._header, self._turned,
            offset=norm.offset, eps=norm.eps, capacity=self._chunk,
        )  # fmt: skip

    def run(
        self, mixer: Attention, h: Tensor, record: Tensor, buffer: KeyValueBuffer | None
    ) -> Tensor:
        """Keys and values of all rows to their slots; [T, heads * dim] of what rows attend to."""
        for weight, part in zip(mixer.inputs, self._parts, strict=True):
            torch.mm(h, weight.T, out=part)
        self._rotate(mixer.q_norm, mixer.k_norm, record)
        if self._slot is None:
            return self._by_regions(mixer, record, self._room, self._gate)[: len(h)]
        assert buffer is not None
        out = self._of_chunk(mixer, buffer, self._slot)
        if self._gate is not None:
            out = out * self._gate[: self._chunk].sigmoid()
        out = out.flatten(1)
        if self._chunk == len(h):
            return out
        gate = None if self._gate is None else self._gate[-1:]
        return torch.cat([out, self._by_regions(mixer, record, self._turned[-1:], gate)])

    def _of_chunk(self, mixer: Attention, buffer: KeyValueBuffer, slot: int) -> Tensor:
        """[T, heads, dim] of the chunk rows, which see all slots before theirs."""
        q = self._turned[: self._chunk]
        keys, values = buffer.read(slot + len(q))
        causal = slot == 0
        mask = None if causal else causal_lower_right(len(q), keys.shape[2])
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, values,
            attn_mask=mask, is_causal=causal, scale=mixer.scale, enable_gqa=True,
        )  # fmt: skip
        return out[0].transpose(0, 1)

    def _by_regions(
        self, mixer: Attention, record: Tensor, q: Tensor, gate: Tensor | None
    ) -> Tensor:
        """[T, heads * dim] of rows that end in the decode row, or in its place."""
        plan = plan_attention(len(q), mixer.heads, mixer.key_heads, mixer.dim, q.element_size())
        size = scratch_size(len(q), mixer.heads, mixer.dim, plan.splits)
        out = q.new_empty(len(q), mixer.heads * mixer.dim)
        region_attention(
            q, self._header, record, out, q.new_empty(size, dtype=torch.float32),
            kv_heads=mixer.key_heads, scale=mixer.scale, plan=plan, gate=gate,
        )  # fmt: skip
        return out
