"""What happened in one turn. Plain data; imports no model code."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor


class _HostMark:
    def __init__(self) -> None:
        self.at = time.perf_counter()

    def until(self, later: _HostMark) -> float:
        return (later.at - self.at) * 1e3


class _DeviceMark:
    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(torch.cuda.current_stream(device))

    def until(self, later: _DeviceMark) -> float:
        later.event.synchronize()
        return self.event.elapsed_time(later.event)


def mark(device: torch.device) -> Any:
    """Record a point in time without waiting: an event on a GPU, the clock elsewhere."""
    return _DeviceMark(device) if device.type == "cuda" else _HostMark()


@dataclass
class RaincheckReport:
    """One turn's figures, filled as the turn runs. Times are milliseconds.

    Attributes:
        n_visual: Multimodal tokens in the turn's new input.
        n_selected: Of them, in the initial prefill.
        n_deferred: Of them, deferred (or dropped, for hard pruning).
        selected: int64 [n_selected], their positions in ``input_ids`` as passed.
        deferred: int64 [n_deferred], likewise, in the order of restoration.
        restored_per_step: How many deferred tokens rode in the pass that consumed y_1, y_2, ...
        pending: Deferred tokens not yet restored; 0 for hard pruning, whose tokens are gone.
        vision_ms: Vision tower over the new images and videos; None without any.
        select_ms: Selection; None without multimodal tokens.
        prefill_ms: Initial prefill.
        ttft_ms: From the call to the first logits.
        step_ms: Each decode step, stock loop included.
        completion_ms: Restoring the rest after the answer; None until it ran.
        executor: Which executor ran the passes.
    """

    n_visual: int = 0
    n_selected: int = 0
    n_deferred: int = 0
    selected: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    deferred: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    restored_per_step: list[int] = field(default_factory=list)
    pending: int = 0
    vision_ms: float | None = None
    select_ms: float | None = None
    prefill_ms: float | None = None
    ttft_ms: float | None = None
    step_ms: list[float] = field(default_factory=list)
    completion_ms: float | None = None
    executor: str = "modules"

    @property
    def restored_in_answer(self) -> int:
        """Deferred tokens restored during decode."""
        return sum(self.restored_per_step)

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first; None for answers of one token."""
        return sum(self.step_ms) / len(self.step_ms) if self.step_ms else None

    def copy(self) -> RaincheckReport:
        """An independent copy."""
        return replace(
            self, restored_per_step=list(self.restored_per_step), step_ms=list(self.step_ms)
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain["selected"] = self.selected.tolist()
        plain["deferred"] = self.deferred.tolist()
        plain["restored_in_answer"] = self.restored_in_answer
        plain["tpot_ms"] = self.tpot_ms
        return plain

    def summary(self) -> str:
        """A short table for people."""

        def ms(value: float | None) -> str:
            return "-" if value is None else f"{value:.1f} ms"

        restored = self.restored_in_answer
        rows = [
            ("multimodal tokens", f"{self.n_visual}"),
            ("selected / deferred", f"{self.n_selected} / {self.n_deferred}"),
            ("restored in the answer", f"{restored}"),
            ("pending", f"{self.pending}"),
            ("vision / selection", f"{ms(self.vision_ms)} / {ms(self.select_ms)}"),
            ("prefill / TTFT", f"{ms(self.prefill_ms)} / {ms(self.ttft_ms)}"),
            ("TPOT", f"{ms(self.tpot_ms)} over {len(self.step_ms)} steps"),
            ("completion", ms(self.completion_ms)),
            ("executor", self.executor),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


class TurnClock:
    """Collects marks during a turn and writes the report's times once, at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: dict[str, list[Any]] = {}
        self._start = mark(device)
        self._steps: list[Any] = []

    def start(self, name: str) -> None:
        """Begin a span, such as ``vision_ms``."""
        self._spans[name] = [mark(self._device)]

    def stop(self, name: str) -> None:
        """End a span."""
        self._spans[name].append(mark(self._device))

    def step(self) -> None:
        """Logits of one more token are there."""
        self._steps.append(mark(self._device))

    def write(self, report: RaincheckReport) -> None:
        """Read the marks; on a GPU this waits for the last of them."""
        for name, span in self._spans.items():
            if len(span) == 2:
                setattr(report, name, span[0].until(span[1]))
        if self._steps:
            report.ttft_ms = self._start.until(self._steps[0])
        report.step_ms = [
            before.until(after) for before, after in zip(self._steps, self._steps[1:], strict=False)
        ]
