"""What cannot be configured, because nobody should want it: switched on for a measurement only.

Each is a context that exchanges one function of a class for all conversations of the process, and
puts it back on the way out. No other turn may run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from raincheck_hf.buffers import KeyValueBuffer
from raincheck_hf.executor import Pass, PassResult, modules
from raincheck_hf.executor.modules import ModulesExecutor, visible_slots
from raincheck_hf.kernels.suffix_map import Convolution
from raincheck_hf.recurrent import Checkpoint, RecurrentState
from raincheck_hf.regions import Group, last_slot


@contextmanager
def uncorrected() -> Iterator[None]:
    """Switch the state correction off, everywhere, until the context is left.

    Restored tokens then move the prefix checkpoint of a recurrent layer, but its live state stays
    as it is: neither boundary repair nor join. Attention layers are not concerned.
    """
    corrected = RecurrentState.moved

    def moved(self: RecurrentState, conv: Convolution, prefix: Checkpoint) -> RecurrentState:
        if self.lead is None:  # without a suffix the live state is the checkpoint itself
            return corrected(self, conv, prefix)
        return replace(self, prefix=prefix)

    RecurrentState.moved = moved  # type: ignore[method-assign]
    try:
        yield
    finally:
        RecurrentState.moved = corrected  # type: ignore[method-assign]


@contextmanager
def by_position() -> Iterator[None]:
    """Let a deferred row see what stands before it in the source, until the context is left.

    By region it sees all of P and what of D is restored; by position, of these, only the tokens
    that a full prefill would have shown it: a token behind it in the picture, and the question, are
    out of its sight. Decode rows see the same as ever, and so do recurrent layers, which have no
    rows to hide.

    Passes must run through the model's own layers (executor `modules`).
    """
    by_region = ModulesExecutor.run
    known: WeakKeyDictionary[KeyValueBuffer, Tensor] = WeakKeyDictionary()

    def run(
        self: ModulesExecutor, model: Any, work: Pass, buffers: Mapping[int, KeyValueBuffer]
    ) -> PassResult:
        buffer = next(iter(buffers.values()))  # stands for its conversation
        places = known[buffer] = _noted(known.get(buffer), work)

        def narrowed(groups: tuple[Group, ...], device: torch.device) -> Tensor | None:
            return _narrowed(places.to(device), groups, work.opening, device)

        modules.visible_slots = narrowed
        try:
            return by_region(self, model, work, buffers)
        finally:
            modules.visible_slots = visible_slots

    ModulesExecutor.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        ModulesExecutor.run = by_region  # type: ignore[method-assign]


def _noted(places: Tensor | None, work: Pass) -> Tensor:
    """int64 [slots]: where the row in each slot stands in the source, this pass's rows included.

    M-RoPE positions, axis by axis, order an input's tokens as the source does.
    """
    parts = [span.block.positions[:, span.start : span.stop] for span in work.spans]
    if work.token is not None:
        parts.append(work.token.position[:, None])
    time, height, width = torch.cat([part.cpu() for part in parts], dim=1)
    own = (time << 40) + (height << 20) + width
    stop = last_slot(work.groups)
    noted = torch.zeros(stop, dtype=torch.long, device=own.device)
    if places is not None:
        keep = min(stop, len(places))
        noted[:keep] = places[:keep]
    start = 0
    for group in work.groups:
        noted[group.slot : group.slot + group.rows] = own[start : start + group.rows]
        start += group.rows
    return noted


def _narrowed(
    places: Tensor, groups: tuple[Group, ...], opening: bool, device: torch.device
) -> Tensor | None:
    """`visible_slots`, without what stands behind a deferred row."""
    visible = visible_slots(groups, device)
    if opening or all(group.suffix for group in groups):
        return visible
    if visible is None:  # a single row, to which all before it was visible
        visible = torch.ones(1, last_slot(groups), dtype=torch.bool, device=device)
    start = 0
    for group in groups:
        rows = slice(start, start + group.rows)
        if not group.suffix:
            own = places[group.slot : group.slot + group.rows]
            visible[rows] &= places[: visible.shape[1]] <= own[:, None]
        start += group.rows
    return visible
