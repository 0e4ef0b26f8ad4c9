"""Passes through the lean forward: Triton kernels on the model's own weights, steps captured."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from raincheck_hf.buffers import KeyValueBuffer
from raincheck_hf.executor.base import Pass, PassResult
from raincheck_hf.executor.captured import CapturedPrefills
from raincheck_hf.executor.capturing import Recorder
from raincheck_hf.executor.described import Descriptor
from raincheck_hf.executor.plan import Attention, Plan, Recurrent, make_plan
from raincheck_hf.executor.prefill import Prefill
from raincheck_hf.executor.states import RecurrentPass
from raincheck_hf.executor.steps import Steps
from raincheck_hf.executor.tower import LeanTower
from raincheck_hf.kernels.linear import MOST_ROWS
from raincheck_hf.models import adapter_for, vision
from raincheck_hf.regions import last_slot

_log = logging.getLogger("raincheck_hf")


class FusedExecutor:
    """See the module's docstring. One a model, of which it holds the weights alone.

    Attributes:
        plan: The weights.
    """

    name = "fused"
    one_device = True

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._recurrent = {
            i: layer.mixer
            for i, layer in enumerate(plan.layers)
            if isinstance(layer.mixer, Recurrent)
        }
        self._steps: dict[int, Steps] = {}
        self._recorder = Recorder(plan.device)
        self._prefills = CapturedPrefills(plan)
        # Passes of each of the three share memory among them.
        self._steps_order, self._prefill_order, self._tower_order = (
            _Order(plan.device) for _ in range(3)
        )
        self._tower: LeanTower | None = None

    def run(self, model: Any, work: Pass, buffers: Mapping[int, KeyValueBuffer]) -> PassResult:
        """See ``Executor.run``."""
        self._make_room(work, buffers)
        few = not work.opening and (not work.chunk or work.chunk <= work.chunk_size < MOST_ROWS)
        steps = self._steps_for(work) if few else None
        alone = not few and work.token is None
        prefill = self._prefills.find(work.chunk) if alone else None
        recurrent = RecurrentPass(self._recurrent, work) if self._recurrent else None
        if steps or prefill:
            (self._steps_order if steps else self._prefill_order).follow()
        again = steps or prefill
        about = again.descriptor if again else Descriptor(self.plan, 0, again=False)
        about.write(work, buffers, recurrent, fetched=few)
        logits: Tensor | None
        if steps:
            steps.run()
            logits = steps.logits.clone() if work.wants_logits else None
        else:
            rows = work.rows(adapter_for(model), model)
            if prefill:
                logits = prefill.run(rows)
            else:
                token = work.token is not None
                once = Prefill(self.plan, about, rows, work.groups[0].slot, token)
                logits = once.run(dict(buffers), work.wants_logits)
        return PassResult(logits, recurrent.outcome() if recurrent else {})

    def encode(
        self, model: Any, pixel_values: Tensor, grid_thw: Tensor, kind: vision.Kind
    ) -> vision.VisionOutput:
        """See ``Executor.encode``; the tower's own forward where somebody hooked into it."""
        tower = model.model.visual
        lean = self._tower = self._tower or LeanTower(tower)

        def run(*args: Any) -> vision.TowerPass:
            self._tower_order.follow()
            return lean.run(*args)

        fits = lean.fits(tower)
        return vision.encode(model, pixel_values, grid_thw, kind, run if fits else None)

    def _make_room(self, work: Pass, buffers: Mapping[int, KeyValueBuffer]) -> None:
        slots = max(work.reserve, last_slot(work.groups))
        for i, buffer in buffers.items():
            if buffer.slots < slots:
                mixer = self.plan.layers[i].mixer
                assert isinstance(mixer, Attention)
                buffer.reserve(slots, self.plan.table, mixer.key_heads, mixer.dim)

    def _steps_for(self, work: Pass) -> Steps:
        """The captured steps of the pass's shape; captured now, if this is the first of it."""
        capacity = work.chunk_size if work.chunk else 0
        steps = self._steps.get(capacity)
        if steps is None:
            started = time.monotonic()
            _log.info("preparing passes of %d + 1 rows", capacity)
            steps = Steps(self.plan, capacity)
            if self.plan.device.type == "cuda":
                steps.capture(self._recorder)
            self._steps[capacity] = steps
            _log.info("prepared in %.1f s", time.monotonic() - started)
        return steps


class _Order:
    """Captured launches that share memory: on another stream they wait for the ones before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None  # of the last ones

    def follow(self) -> None:
        """To be called on the current stream before anything that they read is written."""
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream


_guard = threading.Lock()
_executors: WeakKeyDictionary[Any, FusedExecutor] = WeakKeyDictionary()


def known_executor(model: Any) -> FusedExecutor | None:
    """The model's fused executor, if there is one and the model is still what it was made for."""
    with _guard:
        executor = _executors.get(model)
        if executor is not None and not executor.plan.census.holds():
            del _executors[model]  # frees its buffers
            return None
        return executor


def new_executor(model: Any) -> FusedExecutor:
    """Make the model's fused executor; ``why_not`` said None."""
    executor = FusedExecutor(make_plan(model))
    with _guard:
        return _executors.setdefault(model, executor)
