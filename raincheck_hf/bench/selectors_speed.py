"""How long selectors take, and what their plain twins would have taken and chosen."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raincheck_hf.bench.selectors_agreement import OBJECTIVES, TOLERANCE, difference
from raincheck_hf.bench.selectors_inputs import again, make_input
from raincheck_hf.selection import SelectionContext, keep_count, select
from raincheck_hf.selection.greedy import plain_loops


def clock(device: str, work: Callable[[], Any]) -> float:
    """Milliseconds of one call, what it leaves running on a GPU included."""
    wait: Callable[[], Any] = (lambda: torch.cuda.synchronize(device)) if _gpu(device) else int
    wait()
    start = time.perf_counter()
    work()
    wait()
    return (time.perf_counter() - start) * 1e3


def percentiles(times: list[float]) -> dict[str, float]:
    """p20, p50 and p80."""
    if len(times) == 1:
        return dict.fromkeys(("p20", "p50", "p80"), round(times[0], 4))
    cuts = statistics.quantiles(times, n=10, method="inclusive")
    return {name: round(cuts[at], 4) for name, at in (("p20", 1), ("p50", 4), ("p80", 7))}


def measure_speed(
    selector: str, tokens: int, retention: float, device: str, dtype: str, runs: int
) -> dict[str, Any]:
    """Time one whole selection, from the embeddings to the mask, matrices included.

    The plain twin runs once: on a GPU it takes long, and it is no figure that anything rests on.

    Returns:
        `budget`, `selected`; `ms` of the selector; and, for a method with a greedy core,
        `twin_ms`, `objective` and `twin_objective`, their relative `difference`, and `same_picks`,
        the share of picks that both made.

    Raises:
        RuntimeError: the objectives differ by more than `TOLERANCE`.
    """
    context = make_input(selector, tokens, device, getattr(torch, dtype))

    def run() -> Tensor:
        return select(again(context), selector, retention).mask

    mask = run()  # builds kernels
    run()
    times = [clock(device, run) for _ in range(runs)]
    result: dict[str, Any] = {
        "budget": keep_count(retention, tokens),
        "selected": int(mask.sum()),
        "runs": runs,
        "ms": percentiles(times),
    }
    if selector in OBJECTIVES:
        result |= _against_twin(context, selector, run, mask, device)
    return result


def _against_twin(
    context: SelectionContext,
    selector: str,
    run: Callable[[], Tensor],
    mask: Tensor,
    device: str,
) -> dict[str, Any]:
    twin: list[Tensor] = []
    with plain_loops():
        twin_ms = clock(device, lambda: twin.append(run()))
    objective = OBJECTIVES[selector]
    found, expected = (
        objective(again(context), chosen.nonzero().squeeze(1)) for chosen in (mask, twin[0])
    )
    gap = difference(found, expected)
    if gap > TOLERANCE:
        raise RuntimeError(
            f"{selector} reaches {found} for {context.n} tokens where its twin reaches {expected}"
        )
    return {
        "twin_ms": round(twin_ms, 3),
        "objective": found,
        "twin_objective": expected,
        "difference": gap,
        "same_picks": round(float((mask & twin[0]).sum() / mask.sum()), 6),
    }


def measure_report(
    model: Any, processor: Any, device: str, wanted_ms: float = 40
) -> dict[str, Any]:
    """Compare `report.select_ms` with the time that a selector was seen to take from outside.

    Args:
        model: enabled.
        processor: its processor.
        device: where the model is.
        wanted_ms: about how long the selector takes.

    Returns:
        `select_ms` as reported, and `outside_ms`.
    """
    from raincheck_hf.bench.dialogue import Asked, Script
    from raincheck_hf.bench.tasks import make_exam
    from raincheck_hf.config import RaincheckConfig

    outside: list[float] = []

    def slow(context: SelectionContext) -> Tensor:
        outside.append(clock(device, lambda: _spend(device, wanted_ms)))
        return torch.arange(context.n, dtype=torch.float32, device=context.device)

    exam = make_exam("cells", (8, 8), 1, 0, 0)
    script = Script(processor, exam.board.image(), [Asked("?", "", 2)], device)
    config = RaincheckConfig(selector=slow, completion="lazy")
    for _ in range(2):  # the first call pays for loading
        report = script.run(model, "hard", config)[0].report
    assert report.select_ms is not None
    return {"select_ms": round(report.select_ms, 3), "outside_ms": round(outside[-1], 3)}


def _spend(device: str, ms: float) -> None:
    """Be busy: on a GPU with waiting kernels, so that only events around them see the time."""
    if _gpu(device):
        torch.cuda._sleep(int(ms * 1.5e6))  # cycles; clocks are near 1.5 to 2 GHz
    else:
        time.sleep(ms / 1e3)


def _gpu(device: str) -> bool:
    return device.startswith("cuda")
