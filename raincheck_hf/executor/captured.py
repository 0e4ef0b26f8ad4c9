"""Prefills of a few hundred rows, captured: one launch instead of hundreds.

Such a prefill is computed faster than it is launched. Its graph serves every pass of up to so many
rows: lengths and addresses come from the descriptor, and rows that are not in use are seen by
nobody. A size that comes for the first time is launched, the same kernels on the same padded rows,
so that a call gives the same bits whether it is the first of its size or not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raincheck_hf.buffers import Rows
from raincheck_hf.executor.capturing import Recorder
from raincheck_hf.executor.described import Descriptor
from raincheck_hf.executor.plan import Plan
from raincheck_hf.executor.prefill import Prefill

_ROWS = 64  # sizes are multiples of it: products work in tiles of as many rows anyway
_MOST_ROWS = 1024  # more keep the GPU busy for longer than their launches take


class CapturedPrefills:
    """The sizes of one model. They run one after the other, and share their input's memory."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sizes: dict[int, CapturedPrefill] = {}
        self._recorder = Recorder(plan.device)
        self._room: Rows | None = None

    def find(self, rows: int) -> CapturedPrefill | None:
        """What runs a pass of ``rows`` rows; None for too many."""
        size = -(-rows // _ROWS) * _ROWS
        if size > _MOST_ROWS:
            return None
        if size not in self._sizes:
            try:
                room = self._room = self._room or self._make_room()
            except torch.OutOfMemoryError:
                return None  # a pass that is launched asks for less
            own = Rows(
                embeds=room.embeds[:size],
                positions=room.positions.flatten()[: 3 * size].view(3, size),
                visual=room.visual[:size],
                deepstack=tuple(layer[:size] for layer in room.deepstack),
            )
            self._sizes[size] = CapturedPrefill(self._plan, own, self._recorder)
        return self._sizes[size]

    def _make_room(self) -> Rows:
        plan, device = self._plan, self._plan.device
        with torch.inference_mode(False):  # written again in later turns
            return Rows(
                embeds=plan.table.new_zeros(_MOST_ROWS, plan.width),
                positions=torch.zeros(3, _MOST_ROWS, dtype=torch.int64, device=device),
                # Of rows that have none, zero is added.
                visual=torch.arange(_MOST_ROWS, device=device),
                deepstack=plan.table.new_zeros(plan.deepstack, _MOST_ROWS, plan.width).unbind(),
            )


class CapturedPrefill:
    """Passes of up to so many chunk rows, without a decode row.

    Attributes:
        descriptor: What the next pass is.
    """

    def __init__(self, plan: Plan, rows: Rows, recorder: Recorder) -> None:
        """Prepare a size.

        Args:
            plan: The model.
            rows: Where the rows of a pass are put, as many as fit.
            recorder: Of all sizes.
        """
        self._plan, self._rows, self._recorder = plan, rows, recorder
        self.descriptor = Descriptor(plan, 0)
        self._came = 0
        self._graph: Any = None
        self._logits: Tensor | None = None

    def run(self, rows: Rows) -> Tensor:
        """Run the pass that the descriptor says; logits [1, vocabulary] of its last row."""
        self._fill(rows)
        if self._graph is not None:
            self._graph.replay()
            assert self._logits is not None
            return self._logits.clone()
        logits = self._launch()
        self._came += 1
        if self._came == 2 and self._plan.device.type == "cuda":
            # For the next time; without memory for it, passes go on being launched.
            self._graph, self._logits = self._recorder.record(self._launch) or (None, None)
        return logits

    def _fill(self, rows: Rows) -> None:
        count, own = len(rows), self._rows
        own.embeds[:count] = rows.embeds
        own.positions[:, :count] = rows.positions
        for place, layer in zip(own.deepstack, rows.deepstack or own.deepstack, strict=True):
            place.zero_()
            if rows.deepstack:
                place.index_copy_(0, rows.visual, layer.to(place.dtype))

    def _launch(self) -> Tensor:
        logits = Prefill(self._plan, self.descriptor, self._rows, None, token=False).run({}, True)
        assert logits is not None
        return logits
