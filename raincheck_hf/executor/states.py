"""Recurrent states of a pass on the fused executor: memory for what it writes, and the outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raincheck_hf.executor.base import Pass
from raincheck_hf.executor.plan import Recurrent
from raincheck_hf.kernels import descriptor as d
from raincheck_hf.recurrent import Checkpoint, Factors, RecurrentState

_ALIGNED = 16  # bytes; the kernels read that much at once

# What a pass reads of a layer, and where the pass before it left that.
_LEFT_AT = {
    d.PREFIX_STATE_IN: d.PREFIX_STATE_OUT,
    d.PREFIX_HISTORY_IN: d.PREFIX_HISTORY_OUT,
    d.LIVE_STATE_IN: d.LIVE_STATE_OUT,
    d.LIVE_HISTORY_IN: d.LIVE_HISTORY_OUT,
    d.LEAD_STATE_IN: d.LEAD_STATE_OUT,
    d.PHI_IN: d.PHI_OUT,
    d.LEAD_INPUTS_IN: d.LEAD_INPUTS_OUT,
    d.LEAD_G_IN: d.LEAD_G_OUT,
    d.LEAD_BETA_IN: d.LEAD_BETA_OUT,
}


class LayerStates(dict[int, RecurrentState]):
    """State by layer, and where the next pass of the turn finds it.

    A step is too short to ask every tensor of every layer for its address again.

    Attributes:
        addresses: int64 [layers, RECORD_SIZE], right at the entries that such a pass reads.
    """

    def __init__(self, states: Mapping[int, RecurrentState], addresses: Any) -> None:
        super().__init__(states)
        self.addresses = addresses

    def __reduce__(self) -> Any:
        """Copies have other addresses."""
        return dict, (dict(self),)


@dataclass(frozen=True)
class Change:
    """What a pass does to a recurrent layer's memory; the same for every layer of the model.

    Attributes:
        opening: The chunk rows are P, run from the live state.
        chunk: There are chunk rows.
        token: There is a decode row.
        record: Its factors are kept.
        lead: Lead tokens recorded before the pass.
        mapped: There is a suffix map before it.
        reach: W - 1 of the convolution.
    """

    opening: bool
    chunk: bool
    token: bool
    record: bool
    lead: int
    mapped: bool
    reach: int

    @classmethod
    def of(cls, work: Pass, reach: int) -> Change:
        base = None if work.opening else next(iter(work.recurrent.values()), None)
        return cls(
            opening=work.opening,
            chunk=work.chunk > 0,
            token=work.token is not None,
            record=work.record and work.token is not None,
            lead=0 if base is None or base.lead is None else len(base.lead),
            mapped=base is not None and base.phi is not None,
            reach=reach,
        )

    @property
    def appends(self) -> bool:
        """Whether the decode row becomes a lead token."""
        return self.record and self.lead < self.reach

    @property
    def maps(self) -> bool:
        """Whether the decode row extends the suffix map."""
        return self.record and self.lead == self.reach

    @property
    def lead_after(self) -> int:
        return self.lead + self.appends

    @property
    def joins(self) -> bool:
        """Whether the live state is corrected for the chunk."""
        return self.chunk and self.lead_after > 0

    @property
    def moves_live(self) -> bool:
        return self.token or self.joins

    @property
    def moves_lead(self) -> bool:
        return self.appends or self.joins


class RecurrentPass:
    """What one pass reads and writes of the recurrent layers.

    Attributes:
        change: What it does to them.
        layers: Which they are.
        records: int64 [layers, RECORD_SIZE], the layers' records.
    """

    def __init__(self, mixers: Mapping[int, Recurrent], work: Pass) -> None:
        self.layers = tuple(mixers)
        self.change = Change.of(work, next(iter(mixers.values())).conv.reach)
        self._before = work.recurrent
        self._memory = RecurrentMemory(mixers, self.change)
        self._inputs = RecurrentInputs(mixers)
        self._written, places = self._memory.outputs()
        self.records = self._inputs.table(work.recurrent, work.opening).copy()
        self.records[:, self._written] = places

    def outcome(self) -> dict[int, RecurrentState]:
        """State of each layer after the pass."""
        if self._inputs.kept:  # copies, which go with the pass
            return self._memory.outcome(self._before)
        after = self.records.copy()
        for entry, left in _LEFT_AT.items():
            if left.value in self._written:
                after[:, entry.value] = after[:, left.value]
        if not self.change.moves_live:  # it is the checkpoint itself
            after[:, d.LIVE_STATE_IN.value] = after[:, d.PREFIX_STATE_IN.value]
            after[:, d.LIVE_HISTORY_IN.value] = after[:, d.PREFIX_HISTORY_IN.value]
        return LayerStates(self._memory.outcome(self._before), after)


class RecurrentMemory:
    """New memory for one pass, all layers in one allocation a kind; what is not written is None."""

    def __init__(self, mixers: Mapping[int, Recurrent], change: Change) -> None:
        self._layers, self._change = tuple(mixers), change
        conv = next(iter(mixers.values())).conv
        channels, dtype = len(conv.weight), conv.weight.dtype
        heads, reach = conv.value_heads, conv.reach
        state = (heads, conv.key_dim, conv.value_dim)
        fp32 = torch.float32

        def empty(wanted: bool, kind: torch.dtype, *shape: int) -> Tensor | None:
            return _stacked(len(mixers), shape, kind, conv.weight.device) if wanted else None

        # An inference tensor could not be written to by a later turn outside inference mode.
        with torch.inference_mode(False):
            self._prefix_state = empty(change.chunk, fp32, *state)
            self._prefix_history = empty(change.chunk, dtype, channels, reach)
            self._live_state = empty(change.moves_live, fp32, *state)
            self._live_history = empty(change.moves_live, dtype, channels, reach)
            self._lead_state = empty(change.moves_lead, fp32, *state)
            self._phi = empty(change.maps, fp32, heads, conv.key_dim, conv.key_dim)
            self._lead_inputs = empty(change.appends, dtype, channels, reach)
            self._lead_g = empty(change.appends, fp32, reach, heads)
            self._lead_beta = empty(change.appends, fp32, reach, heads)

    def _outputs(self) -> Iterator[tuple[int, int, int]]:
        """(entry of the record, address of the first layer's, bytes from one layer to the next)."""
        for entry, tensor in (
            (d.PREFIX_STATE_OUT, self._prefix_state),
            (d.PREFIX_HISTORY_OUT, self._prefix_history),
            (d.LIVE_STATE_OUT, self._live_state),
            (d.LIVE_HISTORY_OUT, self._live_history),
            (d.LEAD_STATE_OUT, self._lead_state),
            (d.PHI_OUT, self._phi),
            (d.LEAD_INPUTS_OUT, self._lead_inputs),
            (d.LEAD_G_OUT, self._lead_g),
            (d.LEAD_BETA_OUT, self._lead_beta),
        ):
            if tensor is not None:
                yield entry.value, tensor.data_ptr(), tensor.stride(0) * tensor.element_size()

    def outputs(self) -> tuple[list[int], Any]:
        """Entries of the records, and int64 [layers, entries]: where they are written."""
        entries, first, skip = zip(*self._outputs(), strict=True)
        return list(entries), np.array(first) + np.arange(len(self._layers))[:, None] * skip

    def outcome(self, before: Mapping[int, RecurrentState]) -> dict[int, RecurrentState]:
        """State of each layer after the pass."""
        change, count = self._change, len(self._layers)
        prefix: list[Checkpoint | None] = [None] * count
        if self._prefix_state is not None and self._prefix_history is not None:
            both = zip(self._prefix_state.unbind(), self._prefix_history.unbind(), strict=True)
            prefix = [Checkpoint(state, history) for state, history in both]
            if change.opening or not change.moves_live:
                return {
                    layer: RecurrentState.at(moved)
                    for layer, moved in zip(self._layers, prefix, strict=True)
                    if moved is not None
                }
        assert self._live_state is not None and self._live_history is not None
        both = zip(self._live_state.unbind(), self._live_history.unbind(), strict=True)
        live = [Checkpoint(state, history) for state, history in both]
        if change.token and not change.record:
            return {
                layer: RecurrentState(prefix=before[layer].prefix, live=live[at])
                for at, layer in enumerate(self._layers)
            }
        lead = self._leads()
        lead_state = [None] * count if self._lead_state is None else self._lead_state.unbind()
        phi = [None] * count if self._phi is None else self._phi.unbind()
        after = {}
        for at, layer in enumerate(self._layers):
            old = before[layer]
            after[layer] = replace(
                old,
                prefix=prefix[at] or old.prefix,
                live=live[at],
                lead=lead[at] or old.lead,
                lead_state=old.lead_state if lead_state[at] is None else lead_state[at],
                phi=old.phi if phi[at] is None else phi[at],
            )
        return after

    def _leads(self) -> list[Factors | None]:
        if self._lead_inputs is None or self._lead_g is None or self._lead_beta is None:
            return [None] * len(self._layers)
        count = self._change.lead_after
        parts = (
            self._lead_inputs[..., :count].unbind(),
            self._lead_g[:, :count].unbind(),
            self._lead_beta[:, :count].unbind(),
        )
        return [Factors(*layer) for layer in zip(*parts, strict=True)]


class RecurrentInputs:
    """Addresses of what a pass reads; keeps alive what had to be copied for it."""

    def __init__(self, mixers: Mapping[int, Recurrent]) -> None:
        self._layers = tuple(mixers)
        self._conv = next(iter(mixers.values())).conv
        self._nothing: Checkpoint | None = None
        self.kept: list[Tensor] = []

    def table(self, states: Mapping[int, RecurrentState], opening: bool) -> Any:
        """int64 [layers, RECORD_SIZE], addresses at the entries that the pass reads."""
        if isinstance(states, LayerStates) and not opening:
            return states.addresses
        table = np.zeros((len(self._layers), d.RECORD_SIZE.value), dtype=np.int64)
        for at, layer in enumerate(self._layers):
            for entry, address in self._of(states.get(layer), opening).items():
                table[at, entry] = address
        return table

    def _of(self, state: RecurrentState | None, opening: bool) -> dict[int, int]:
        """A layer's addresses by entry of its record."""
        start = self._start() if state is None else state.live if opening else state.prefix
        found = {
            d.PREFIX_STATE_IN.value: self._at(start.state),
            d.PREFIX_HISTORY_IN.value: self._at(start.history),
        }
        if state is None or opening:
            return found
        found[d.LIVE_STATE_IN.value] = self._at(state.live.state)
        found[d.LIVE_HISTORY_IN.value] = self._at(state.live.history)
        if state.lead is not None and state.lead_state is not None:
            found[d.LEAD_STATE_IN.value] = self._at(state.lead_state)
            found[d.LEAD_INPUTS_IN.value] = self._spread(state.lead.inputs).data_ptr()
            found[d.LEAD_G_IN.value] = self._at(state.lead.g)
            found[d.LEAD_BETA_IN.value] = self._at(state.lead.beta)
        if state.phi is not None:
            found[d.PHI_IN.value] = self._at(state.phi)
        return found

    def _start(self) -> Checkpoint:
        """Where a conversation begins, the same for all layers."""
        if self._nothing is None:
            conv, weight = self._conv, self._conv.weight
            self._nothing = Checkpoint(
                torch.zeros(conv.value_heads, conv.key_dim, conv.value_dim, device=weight.device),
                torch.zeros(len(weight), conv.reach, dtype=weight.dtype, device=weight.device),
            )
        return self._nothing

    def _spread(self, inputs: Tensor) -> Tensor:
        """Lead inputs [C, T] with W - 1 columns' room a channel, as the kernels read them."""
        if inputs.stride() == (self._conv.reach, 1) and inputs.data_ptr() % _ALIGNED == 0:
            return inputs
        room = inputs.new_zeros(len(inputs), self._conv.reach)
        room[:, : inputs.shape[1]] = inputs
        self.kept.append(room)
        return room

    def _at(self, tensor: Tensor) -> int:
        """A whole tensor's address; of a copy, where it has gaps or lies across a boundary."""
        if not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNED:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            self.kept.append(tensor)
        return tensor.data_ptr()


def _stacked(
    count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[count, *shape], each of the ``count`` parts aligned."""
    size = torch.Size(shape).numel()
    unit = _ALIGNED // dtype.itemsize
    flat = torch.empty(count, -(-size // unit) * unit, dtype=dtype, device=device)
    return flat[:, :size].view(count, *shape)
