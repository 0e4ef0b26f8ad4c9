"""`raincheck-hf bench completion`: what the background costs, and what it hides.

Random weights run at the speed of trained ones, so real sizes need no download. Each figure is a
row of JSON Lines with the card, versions and commit.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raincheck_hf import RaincheckCache, RaincheckConfig, enable_raincheck
from raincheck_hf.bench.environment import provenance
from raincheck_hf.bench.random_weights import build, prompt, text_turn
from raincheck_hf.bench.stopwatch import spread

Inputs = dict[str, Tensor]


def run(size: str, device: str, out: Path, measures: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run measurements and append their rows.

    Args:
        size: A name of `random_weights.SIZES`.
        device: Where to run.
        out: The file of rows.
        measures: Names of `MEASURES`; empty for all.

    Raises:
        ValueError: An unknown measure.
    """
    unknown = set(measures) - set(MEASURES)
    if unknown:
        raise ValueError(f"unknown measures {sorted(unknown)}; known: {', '.join(MEASURES)}")
    model = enable_raincheck(build(size, device))
    origin = {"model": size, **provenance(device)}
    rows = []
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in measures or MEASURES:
        started = time.perf_counter()
        row = {"measure": name, **MEASURES[name](model), **origin}
        rows.append(row)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shown = {key: value for key, value in row.items() if key not in origin}
        print(f"{time.perf_counter() - started:6.1f} s  {shown}", flush=True)
    return rows


def generate(model: Any, inputs: Inputs, tokens: int, **fields: Any) -> Any:
    """One greedy turn of exactly ``tokens`` tokens; ``fields`` are the config's, and ``cache``."""
    cache = fields.pop("cache", None)
    config = RaincheckConfig(**{"selector": "uniform", **fields})
    return model.generate(
        **inputs,
        raincheck=config,
        cache=cache,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )


def agreement(model: Any) -> dict[str, Any]:
    """Both sides give the same: a turn after background completion, and after blocking."""
    inputs = prompt(model, 16, 16)
    logits = {}
    for completion in ("blocking", "background", "lazy"):
        out = generate(model, inputs, 4, completion=completion, completion_chunk_size=32)
        if completion == "background":
            out.cache.finish(timeout=60)
        again = generate(model, text_turn(model, out), 4, cache=out.cache)
        logits[completion] = torch.cat(again.logits)
        assert out.cache.pending == 0
    scale = logits["blocking"].abs().max()
    return {
        f"{name}_difference": float((logits[name] - logits["blocking"]).abs().max() / scale)
        for name in ("background", "lazy")
    }


def overlap(model: Any) -> dict[str, Any]:
    """Kernels of completion that run after `generate` returned, while the host sleeps."""
    inputs = prompt(model, 32, 32)
    generate(model, inputs, 2).cache.finish(timeout=60)  # warm
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as trace:
        out = generate(model, inputs, 2)
        pending = out.cache.pending
        with torch.profiler.record_function("idle"):
            returned = time.perf_counter()
            while out.cache.pending:
                time.sleep(0.005)
            idle_ms = (time.perf_counter() - returned) * 1e3
        _wait()
    events = trace.events()
    idle = next(e for e in events if e.name == "idle" and e.device_type.name == "CPU")
    busy = [
        e.time_range.elapsed_us()
        for e in events
        if e.device_type.name == "CUDA"
        and idle.time_range.start <= e.time_range.start <= idle.time_range.end
        and e.name != "idle"
    ]
    return {
        "pending_when_returned": pending,
        "idle_ms_until_complete": idle_ms,
        "kernels_in_idle_time": len(busy),
        "kernel_ms_in_idle_time": sum(busy) / 1e3,
        "completion_ms": out.raincheck.completion_ms,
    }


def early_follow_up(model: Any, rounds: int = 7) -> dict[str, Any]:
    """P11: TTFT of turn 2 with 1,000 tokens pending, over TTFT without, over one such prefill."""
    inputs = prompt(model, 32, 45)  # 1,440 tokens, of which 1,008 are deferred
    early: list[float] = []
    late: list[float] = []
    prefill: list[float] = []
    for _ in range(rounds + 1):
        for completion, times in (("lazy", early), ("blocking", late)):
            out = generate(
                model, inputs, 2, defer="post_answer", completion=completion,
                completion_chunk_size=256,
            )  # fmt: skip
            pending = out.raincheck.n_deferred if completion == "lazy" else 0
            assert out.cache.pending == pending
            _wait()
            again = generate(model, text_turn(model, out), 1, cache=out.cache)
            times.append(again.raincheck.ttft_ms)
        prefill.append(_prefill_of(model, inputs, pending=1008))
    early, late, prefill = early[1:], late[1:], prefill[1:]
    extra = statistics.median(early) - statistics.median(late)
    return {
        "ttft_early_ms": spread(early),
        "ttft_late_ms": spread(late),
        "prefill_1008_rows_ms": spread(prefill),
        "extra_over_prefill": extra / statistics.median(prefill),
    }


def _prefill_of(model: Any, inputs: Inputs, pending: int) -> float:
    """One forward of as many rows on the same P, without anything of raincheck around it."""
    from transformers import DynamicCache

    text = model.model.language_model
    past = inputs["input_ids"].shape[1] - pending
    cache = DynamicCache(config=model.config.get_text_config())
    width = model.config.get_text_config().hidden_size

    def forward(rows: int) -> None:
        embeds = torch.randn(1, rows, width, device=model.device, dtype=model.dtype)
        text(inputs_embeds=embeds, cache=cache, use_cache=True)

    with torch.no_grad():
        forward(past)
        return _timed(lambda: forward(pending))


def foreground(model: Any, tokens: int = 64) -> dict[str, Any]:
    """TPOT of one conversation while others complete, over its TPOT alone."""
    small, large = prompt(model, 8, 8), prompt(model, 64, 64)
    generate(model, small, tokens, completion="lazy")
    alone, beside = [], []
    for _ in range(3):
        alone.append(generate(model, small, tokens, completion="lazy").raincheck.tpot_ms)
        other = generate(model, large, 1, defer="post_answer", completion_chunk_size=64)
        before = other.cache.pending
        beside.append(generate(model, small, tokens, completion="lazy").raincheck.tpot_ms)
        restored = before - other.cache.pending
        other.cache.close()
    return {
        "tpot_alone_ms": spread(alone),
        "tpot_beside_ms": spread(beside),
        "ratio": statistics.median(beside) / statistics.median(alone),
        "restored_meanwhile": restored,
    }


def turnover(model: Any, conversations: int = 1000) -> dict[str, Any]:
    """Device memory over many conversations opened and closed, half of them dropped instead."""
    inputs = prompt(model, 8, 8)
    held: dict[int, int] = {}
    for number in range(conversations):
        out = generate(model, inputs, 1, cache=RaincheckCache(model), completion_chunk_size=16)
        if number % 2:
            out.cache.close()
        del out
        if number in (20, conversations // 4, conversations // 2, conversations - 1):
            time.sleep(0.2)  # what was dropped stops within one chunk
            gc.collect()
            _wait()
            held[number + 1] = _allocated()
            print(f"  {number + 1} conversations: {held[number + 1]} bytes held", flush=True)
    return {"allocated_bytes_after": held}


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def _timed(work: Callable[[], Any]) -> float:
    _wait()
    started = time.perf_counter()
    work()
    _wait()
    return (time.perf_counter() - started) * 1e3


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


MEASURES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "agreement": agreement,
    "overlap": overlap,
    "early_follow_up": early_follow_up,
    "foreground": foreground,
    "turnover": turnover,
}
