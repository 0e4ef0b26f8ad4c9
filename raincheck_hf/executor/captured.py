"""Prefills of sizes that come again, captured: one launch instead of hundreds.

A prefill of a few hundred rows is computed faster than it is launched. Its graph serves every pass
of up to so many rows: lengths and addresses come from the descriptor, and rows that are not in use
are seen by nobody.
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
    """The captured sizes of one model."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seen: set[int] = set()
        self._kept: dict[int, CapturedPrefill] = {}
        self._recorder = Recorder(plan.device)

    def find(self, rows: int) -> CapturedPrefill | None:
        """What runs a pass of ``rows`` rows; None for too many, and where such come first."""
        size = -(-rows // _ROWS) * _ROWS
        if size > _MOST_ROWS:
            return None
        if size not in self._seen:
            self._seen.add(size)
            return None
        if size not in self._kept:
            try:
                self._kept[size] = CapturedPrefill(self._plan, size, self._recorder)
            except torch.OutOfMemoryError:
                return None  # a pass that is launched asks for less
        return self._kept[size]


class CapturedPrefill:
    """Passes of up to ``size`` chunk rows, without a decode row.

    Attributes:
        descriptor: What the next pass is.
    """

    def __init__(self, plan: Plan, size: int, recorder: Recorder) -> None:
        self._plan, self._recorder = plan, recorder
        self.descriptor = Descriptor(plan, 0)
        self._graph: Any = None
        self._tried = plan.device.type != "cuda"
        self._logits: Tensor | None = None
        device = plan.device
        with torch.inference_mode(False):  # written again in later turns
            self._rows = Rows(
                embeds=plan.table.new_zeros(size, plan.width),
                positions=torch.zeros(3, size, dtype=torch.int64, device=device),
                # Of rows that have none, zero is added.
                visual=torch.arange(size, device=device),
                deepstack=plan.table.new_zeros(plan.deepstack, size, plan.width).unbind(),
            )

    def run(self, rows: Rows) -> Tensor:
        """Run the pass that the descriptor says; logits [1, vocabulary] of its last row."""
        self._fill(rows)
        if self._graph is not None:
            self._graph.replay()
            assert self._logits is not None
            return self._logits.clone()
        logits = self._launch()
        if not self._tried:  # for the next time; without memory for it, passes go on being launched
            self._tried = True
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
