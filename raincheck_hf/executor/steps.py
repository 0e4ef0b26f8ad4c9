"""The lean forward for a decode row and a chunk: up to 64 rows, the same launches for every pass.

Buffers have fixed places and lengths come from the descriptor, so that on a GPU the launches are
captured once and replayed for any conversation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raincheck_hf.executor.capturing import Recorder
from raincheck_hf.executor.described import Descriptor
from raincheck_hf.executor.plan import Attention, Layer, Plan, Recurrent
from raincheck_hf.kernels import gdn
from raincheck_hf.kernels.attention_kernels import region_attention
from raincheck_hf.kernels.attention_plan import plan_attention, scratch_size
from raincheck_hf.kernels.linear import Scratch, linear, swiglu
from raincheck_hf.kernels.norm import gated_rms_norm, rms_norm
from raincheck_hf.kernels.rope_kernels import rope_table, rotate_and_write
from raincheck_hf.kernels.rows import add_deepstack, gather


class Steps:
    """Passes of one shape: ``capacity`` chunk rows and a decode row behind them.

    Attributes:
        descriptor: What the next pass is.
        logits: [1, vocabulary] of the decode row, of the last pass.
    """

    def __init__(self, plan: Plan, capacity: int) -> None:
        self._plan, self._capacity = plan, capacity
        self.descriptor = Descriptor(plan, capacity)
        rows = capacity + 1

        def empty(*shape: int, dtype: torch.dtype = plan.dtype) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=plan.device)

        with torch.inference_mode(False):
            self._x, self._normed = empty(rows, plan.width), empty(rows, plan.width)
            self._positions = empty(3, rows, dtype=torch.int64)
            half = len(plan.frequencies)
            self._cos, self._sin = (empty(rows, half, dtype=torch.float32) for _ in range(2))
            self._hidden = empty(rows, max(len(layer.gate) for layer in plan.layers))
            self.logits = empty(1, len(plan.head))
            self._scratch = Scratch(plan.device)
            self._mixers: dict[int, Any] = {}
            self._shared: dict[tuple[Any, ...], Any] = {}
            for i, layer in enumerate(plan.layers):
                make: Any = _AttentionStep if isinstance(layer.mixer, Attention) else _RecurrentStep
                key = make.shape(layer.mixer)
                if key not in self._shared:  # layers run one after the other
                    self._shared[key] = make(plan, layer.mixer, capacity)
                self._mixers[i] = self._shared[key]
        self._graph: Any = None

    def run(self) -> None:
        """Run the pass that the descriptor says, on the current stream."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._launch()

    def capture(self, recorder: Recorder) -> None:
        """Build the kernels and capture the launches; the descriptor must say an empty pass."""
        self._launch()
        recorded = recorder.record(self._launch)
        self._graph = recorded and recorded[0]

    def _launch(self) -> None:
        plan, about = self._plan, self.descriptor
        gather(about.header, about.lines, plan.table, self._x, self._positions)
        rope_table(
            self._positions, about.header, plan.frequencies, plan.axis, plan.scaling,
            self._cos, self._sin, plan.dtype,
        )  # fmt: skip
        for i, layer in enumerate(plan.layers):
            self._mixer(i, layer)
            self._feed_forward(layer)
            if self._capacity and i < plan.deepstack:
                add_deepstack(about.header, about.lines, i, self._x)
        linear(
            self._x[self._capacity :], [plan.head], self.logits, self._scratch,
            norm=plan.final,
        )  # fmt: skip

    def _mixer(self, i: int, layer: Layer) -> None:
        mixer = layer.mixer
        step = self._mixers[i]
        if self._capacity:
            rms_norm(self._x, *_of(layer.before), self._normed)
            linear(self._normed, mixer.inputs, step.projected, self._scratch)
        else:
            linear(
                self._x,
                mixer.inputs,
                step.projected,
                self._scratch,
                norm=layer.before,
            )
        about = self.descriptor
        if isinstance(mixer, Attention):
            step.run(mixer, layer, self._cos, self._sin, about.header, about.records[i])
        else:
            step.run(mixer, about.header, about.records[i])
        linear(step.out, [mixer.output], self._x, self._scratch, residual=self._x)

    def _feed_forward(self, layer: Layer) -> None:
        if self._capacity:
            rms_norm(self._x, *_of(layer.between), self._normed)
            swiglu(self._normed, layer.gate, layer.up, self._hidden, self._scratch)
        else:
            swiglu(
                self._x, layer.gate, layer.up, self._hidden, self._scratch,
                norm=layer.between,
            )  # fmt: skip
        linear(self._hidden, [layer.down], self._x, self._scratch, residual=self._x)


class _AttentionStep:
    """Buffers of an attention mixer, shared by layers of one shape.

    Attributes:
        projected: [rows, q | k | v].
        out: [rows, heads * dim].
    """

    def __init__(self, plan: Plan, mixer: Attention, capacity: int) -> None:
        rows = capacity + 1
        new = plan.table.new_empty
        self.projected = new(rows, sum(map(len, mixer.inputs)))
        self.out = new(rows, mixer.heads * mixer.dim)
        q, k, v = self.projected.split([len(weight) for weight in mixer.inputs], dim=1)
        self._q, self._k, self._v, self._gate = split_heads(q, k, v, mixer)
        self._turned = new(rows, mixer.heads, mixer.dim)
        self._plan = plan_attention(
            rows, mixer.heads, mixer.key_heads, mixer.dim, plan.table.element_size()
        )
        size = scratch_size(rows, mixer.heads, mixer.dim, self._plan.splits)
        self._scratch = new(size, dtype=torch.float32)
        blocks = self._plan.row_blocks(rows, mixer.heads // mixer.key_heads)
        self._arrivals = torch.zeros(
            mixer.key_heads * blocks, dtype=torch.int32, device=plan.device
        )

    @staticmethod
    def shape(mixer: Attention) -> tuple[Any, ...]:
        """Layers with the same one share their buffers."""
        return ("attention", mixer.heads, mixer.key_heads, mixer.dim, mixer.gated)

    def run(
        self,
        mixer: Attention,
        layer: Layer,
        cos: Tensor,
        sin: Tensor,
        header: Tensor,
        record: Tensor,
    ) -> None:
        """From ``projected`` to ``out``."""
        rotate_and_write(
            self._q, self._k, self._v, mixer.q_norm, mixer.k_norm, cos, sin, header, record,
            self._turned, offset=layer.before.offset, eps=layer.before.eps,
        )  # fmt: skip
        region_attention(
            self._turned, header, record, self.out, self._scratch,
            kv_heads=mixer.key_heads, scale=mixer.scale, gate=self._gate,
            arrivals=self._arrivals, plan=self._plan,
        )  # fmt: skip


class _RecurrentStep:
    """Buffers of a recurrent mixer, shared by layers of one shape.

    Attributes:
        projected: [rows, qkv | z | b | a].
        out: [rows, HV * V].
    """

    def __init__(self, plan: Plan, mixer: Recurrent, capacity: int) -> None:
        rows, conv = capacity + 1, mixer.conv
        new = plan.table.new_empty
        self.projected = new(rows, sum(map(len, mixer.inputs)))
        self._mixed, self._z, self._b, self._a = self.projected.split(
            [len(weight) for weight in mixer.inputs], dim=1
        )
        self._raw = new(rows, conv.value_heads * conv.value_dim)
        self.out = torch.empty_like(self._raw)
        self._workspace = gdn.Workspace.allocate(conv, capacity) if capacity else None

    @staticmethod
    def shape(mixer: Recurrent) -> tuple[Any, ...]:
        """Layers with the same one share their buffers."""
        return ("recurrent",)

    def run(self, mixer: Recurrent, header: Tensor, record: Tensor) -> None:
        """From ``projected`` to ``out``."""
        rows = (self._mixed, self._a, self._b, self._raw, mixer.conv, mixer.gates, header, record)
        if self._workspace is None:
            gdn.step(*rows)
        else:
            gdn.prepare(*rows, self._workspace)
            gdn.scan(self._raw, mixer.conv, header, record, self._workspace)
        gated_rms_norm(self._raw, mixer.norm, self._z, mixer.eps, self.out)


def split_heads(
    q: Tensor, k: Tensor, v: Tensor, mixer: Attention
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Views q, k, v and gate (or None), [T, heads, dim] each, of projections [T, ...]."""
    k, v = (part.unflatten(1, (mixer.key_heads, mixer.dim)) for part in (k, v))
    if not mixer.gated:
        return q.unflatten(1, (mixer.heads, mixer.dim)), k, v, None
    q, gate = q.unflatten(1, (mixer.heads, 2, mixer.dim)).unbind(2)
    return q, k, v, gate


def _of(norm: Any) -> tuple[Tensor, int, float]:
    return norm.weight, norm.offset, norm.eps
