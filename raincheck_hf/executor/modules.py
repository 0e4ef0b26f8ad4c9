"""Passes through the model's own layers: adapters, quantised weights, hooks and CPUs work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from raincheck_hf.buffers import KeyValueBuffer
from raincheck_hf.executor.base import Pass, PassResult
from raincheck_hf.models import Adapter, adapter_for, vision
from raincheck_hf.recurrent import Checkpoint, Factors, RecurrentState
from raincheck_hf.regions import Group, last_slot, plain_causal


class ModulesExecutor:
    """See the module's docstring."""

    name = "modules"
    one_device = False

    def run(self, model: Any, work: Pass, buffers: Mapping[int, KeyValueBuffer]) -> PassResult:
        """See ``Executor.run``."""
        adapter = adapter_for(model)
        cache = PassCache(adapter, work, buffers)
        rows = work.rows(adapter, model)
        device = rows.embeds.device
        hidden = adapter.run_text(model, rows, visible_slots(work.groups, device), cache)
        logits = adapter.head(model, hidden[-1:]) if work.wants_logits else None
        return PassResult(logits, cache.recurrent)

    def encode(
        self, model: Any, pixel_values: Tensor, grid_thw: Tensor, kind: vision.Kind
    ) -> vision.VisionOutput:
        """See ``Executor.encode``."""
        return vision.encode(model, pixel_values, grid_thw, kind)


def visible_slots(groups: tuple[Group, ...], device: torch.device) -> Tensor | None:
    """Who sees whom, bool [T, slots]; None where plain causal attention is the same.

    Args:
        groups: The pass's row groups.
        device: Where to build it.
    """
    if plain_causal(groups):
        return None
    slots = torch.arange(last_slot(groups), device=device)
    parts = []
    for group in groups:
        seen = torch.zeros(len(slots), dtype=torch.bool, device=device)
        for start, stop in group.sees:
            seen[start:stop] = True
        own = torch.arange(group.slot, group.slot + group.rows, device=device)
        causal = (slots >= group.slot) & (slots <= own[:, None])
        parts.append(causal | seen)
    return torch.cat(parts)


class PassCache(Cache):
    """What the model's layers take for their cache during one pass.

    Attention layers write to the conversation's buffers; recurrent layers run once for each group
    of rows, from that group's own state (``run_recurrent``).

    Attributes:
        recurrent: State of each recurrent layer after the pass, filled as the layers run.
    """

    def __init__(self, adapter: Adapter, work: Pass, buffers: Mapping[int, KeyValueBuffer]) -> None:
        super().__init__(layers=[])
        self._adapter = adapter
        self._work = work
        self._buffers = buffers
        self._stop = last_slot(work.groups)
        self.recurrent: dict[int, RecurrentState] = {}

    def __len__(self) -> int:
        return max(1, len(self._buffers))  # a cache that counts as empty would be replaced

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the rows' keys and values [1, H, T, dim] to their slots; return all visible."""
        buffer = self._buffers[layer_idx]
        for group, start in _starts(self._work.groups):
            rows = slice(start, start + group.rows)
            buffer.write(
                group.slot, key_states[:, :, rows], value_states[:, :, rows], self._work.reserve
            )
        return buffer.read(self._stop)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots before this pass's first row, when the pass is plain."""
        return self._work.groups[0].slot

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys handed to attention, and their offset."""
        return self._stop, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Slot of the first row, when the pass is plain."""
        return self._work.groups[0].slot

    @property
    def is_compileable(self) -> bool:
        """Shapes change with every pass."""
        return False

    def run_recurrent(self, mixer: Any, stock: Any, hidden: Tensor, **kwargs: Any) -> Tensor:
        """Run a recurrent mixer on [1, T, d], group by group, and keep its new state.

        Args:
            mixer: The layer's token mixer.
            stock: Its own forward.
            hidden: [1, T, d].
            **kwargs: Passed on to ``stock``.
        """
        base = self._work.recurrent.get(mixer.layer_idx)
        state, moved, conv = base, None, None
        outputs = []
        for group, start in _starts(self._work.groups):
            rows = hidden[:, start : start + group.rows]
            keep = group.suffix and self._work.record
            run = _GroupRun(self._adapter, mixer, self._starting_point(base, group), rows, keep)
            outputs.append(stock(hidden_states=rows, cache=run, **kwargs))
            conv = run.conv
            if not group.suffix:
                moved = run.end()
            else:
                assert state is not None  # a decode row always follows a prefill
                if run.factors is not None:
                    state = state.recorded(conv, run.state, run.factors)
                else:
                    state = state.consumed(run.state, run.inputs)
        # The chunk's end becomes the new checkpoint only after y_t joined the suffix (rule 8).
        if moved is not None:
            if self._work.opening or state is None:
                state = RecurrentState.at(moved)
            else:
                assert conv is not None
                state = state.moved(conv, moved)
        assert state is not None  # every pass has rows
        self.recurrent[mixer.layer_idx] = state
        return torch.cat(outputs, dim=1)

    def _starting_point(self, base: RecurrentState | None, group: Group) -> Checkpoint | None:
        if base is None:
            return None
        return base.live if group.suffix or self._work.opening else base.prefix


class _GroupRun:
    """The cache that a recurrent mixer sees while it runs one group of rows.

    It claims to record the past, so that the mixer hands over its pre-convolution inputs instead
    of updating a convolution state in place. Weights are read at that moment, inside the mixer's
    forward: an offloaded mixer has them only there.

    Attributes:
        conv: The mixer's convolution.
        inputs: [C, T], the rows' pre-convolution inputs.
        factors: What the rows did, where it is to be kept.
        state: fp32 [HV, K, V] after the rows.
    """

    def __init__(
        self,
        adapter: Adapter,
        mixer: Any,
        start: Checkpoint | None,
        rows: Tensor,
        keep: bool,
    ) -> None:
        self._adapter, self._mixer, self._start = adapter, mixer, start
        self._rows = rows
        self._keep = keep
        self.factors: Factors | None = None

    def is_recording_past(self, layer_idx: int) -> bool:
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None if self._start is None else self._start.history[None]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None if self._start is None else self._start.state[None]

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, **kwargs: Any) -> Tensor:
        """Take the rows' inputs [1, C, T]; return them behind the history."""
        self.inputs = conv_states[0].detach()
        self.conv = self._adapter.convolution(self._mixer)
        if self._keep:
            g, beta = self._adapter.factors(self._mixer, self._rows[0])
            self.factors = Factors(self.inputs, g, beta)
        if self._start is None:
            return conv_states
        history = self._start.history[None].to(conv_states.dtype)
        return torch.cat([history, conv_states], dim=-1)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int) -> None:
        self.state = recurrent_states[0].float()

    def end(self) -> Checkpoint:
        """Where the group ended."""
        start = self._start
        if start is None:
            start = Checkpoint(self.state, self.inputs.new_zeros(len(self.inputs), self.conv.reach))
        return start.advanced(self.state, self.inputs)


def _starts(groups: tuple[Group, ...]) -> Iterator[tuple[Group, int]]:
    """Each group and the index of its first row."""
    start = 0
    for group in groups:
        yield group, start
        start += group.rows
