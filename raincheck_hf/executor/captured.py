"""Prefills of sizes that come again, captured: one launch instead of hundreds.

A prefill of a few hundred rows is computed faster than it is launched. Its graph serves every pass
of up to so many rows: lengths and addresses come from the descriptor, and rows that are not in use
are seen by nobody.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from raincheck_hf.buffers import Rows
from raincheck_hf.executor.capturing import record
from raincheck_hf.executor.described import Descriptor
from raincheck_hf.executor.plan import Plan
from raincheck_hf.executor.prefill import Prefill

_ROWS = 64  # sizes are multiples of it: products work in tiles of as many rows anyway
_MOST_ROWS = 1024  # more keep the GPU busy for longer than their launches take
_KEPT = 8  # sizes


class CapturedPrefills:
    """The captured sizes of one model, the most recently used ones."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seen: set[int] = set()
        self._kept: OrderedDict[int, CapturedPrefill] = OrderedDict()
        # Graphs share their memory, as one runs after the other.
        self._pool = torch.cuda.graph_pool_handle() if plan.device.type == "cuda" else None

    def find(self, rows: int) -> CapturedPrefill | None:
        """What runs a pass of ``rows`` rows; None for too many, and where such come first."""
        size = -(-rows // _ROWS) * _ROWS
        if size > _MOST_ROWS:
            return None
        if size not in self._seen:
            self._seen.add(size)
            return None
        if size not in self._kept:
            self._kept[size] = CapturedPrefill(self._plan, size, self._pool)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(size)
        return self._kept[size]


class CapturedPrefill:
    """Passes of up to ``size`` chunk rows, without a decode row.

    Attributes:
        descriptor: What the next pass is.
    """

    def __init__(self, plan: Plan, size: int, pool: Any) -> None:
        self._plan, self._pool = plan, pool
        self.descriptor = Descriptor(plan, 0)
        self._graph: Any = None
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
        if self._plan.device.type == "cuda":
            self._capture()
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

    def _capture(self) -> None:
        """For the next time. Where memory does not suffice, passes go on being launched."""
        with contextlib.suppress(torch.OutOfMemoryError):
            self._graph, self._logits = record(self._launch, self._plan.device, self._pool)
