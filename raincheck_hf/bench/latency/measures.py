"""What is measured. Each takes a model, checks that its sides agree, and returns a row's figures.

Times are ms unless a name says otherwise; `plain` is executor `auto`, which is `fused` on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from raincheck_hf import RaincheckCache
from raincheck_hf.bench.latency.calls import (
    Inputs,
    elapsed,
    interleaved,
    ours,
    ratio,
    spread,
    stock,
)
from raincheck_hf.bench.random_weights import prompt, text_turn, video

# Relative distance of two logits vectors of random bf16 models of 36 layers; measured between the
# model's own layers under two attention backends it is 0.03.
_AGREED = 0.08

Row = dict[str, Any]


def agreement(model: Any) -> Row:
    """Both sides of each ratio compute the same: first logits, and the token each would take."""
    inputs = _picture(model, 1024)
    sides = {
        "stock": stock(model, inputs, 1),
        "full": ours(model, inputs, 1, retention=1.0),
        "full, modules": ours(model, inputs, 1, retention=1.0, executor="modules"),
    }
    base = sides["stock"].logits[0].float()
    row = {f"{name}_from_stock": _apart(side.logits[0], base) for name, side in sides.items()}
    # A selector would turn the towers' rounding into other picks.
    fields: dict[str, Any] = {"guard_tokens": 4, "selector": "uniform"}
    fused = ours(model, inputs, 24, **fields)
    layers = ours(model, inputs, 24, executor="modules", **fields)
    same = (fused.sequences == layers.sequences)[0].int().cumprod(0).sum()
    same = int(same) - inputs["input_ids"].shape[1]
    # The logits behind equal tokens, those of the first choice that differs included.
    pairs = zip(fused.logits[: same + 1], layers.logits[: same + 1], strict=True)
    apart = max(_apart(x, y) for x, y in pairs)
    row |= {"raincheck_from_modules": apart, "equal_tokens_of_24": same}
    wrong = {name: value for name, value in row.items() if "from" in name and value > _AGREED}
    if wrong:
        raise RuntimeError(f"the sides do not agree: {wrong}")
    return row


def floor(model: Any) -> Row:
    """Weights that a token needs over the device's read bandwidth, in one run."""
    text = model.model.language_model
    weights = sum(
        p.numel() * p.element_size() for p in (*text.layers.parameters(), model.lm_head.weight)
    )
    size = 2**30 if model.device.type == "cuda" else 2**24
    block = torch.ones(size, device=model.device)
    times = [elapsed(block.sum)[0] for _ in range(7)][2:]
    if model.device.type == "cuda":
        times = _device_times(block.sum)
    bandwidth = size * 4 / (min(times) / 1e3)
    return {
        "weights_gb": round(weights / 1e9, 3),
        "bandwidth_tb_s": round(bandwidth / 1e12, 3),
        "floor_ms": float(f"{weights / bandwidth * 1e3:.4g}"),
    }


def steps(model: Any, tokens: int = 96, rounds: int = 3) -> Row:
    """P1, P2, P9: a plain step, one with a chunk, and both one after the other."""
    inputs = _picture(model, 1024)
    plain: list[float] = []
    fused: list[float] = []
    serial: list[float] = []
    for number in range(rounds + 1):
        turns = {
            "plain": ours(model, inputs, tokens, retention=1.0),
            "fused": ours(model, inputs, tokens, guard_tokens=4),
            "serial": ours(model, inputs, tokens, guard_tokens=4, fuse=False),
        }
        if not number:
            _must_match(turns["fused"], turns["serial"])
            continue
        plain += turns["plain"].raincheck.step_ms[4:]
        fused += _restoring(turns["fused"].raincheck)
        serial += _restoring(turns["serial"].raincheck)
    base = floor(model)
    stock_step = _stock_step(model, inputs)
    return {
        **base,
        "tpot_ms": spread(plain),
        "stock_tpot_ms": stock_step,
        "P1_tpot_over_floor": ratio(plain, [base["floor_ms"]]),
        "stock_over_floor": ratio([stock_step], [base["floor_ms"]]),
        "chunk_step_ms": spread(fused),
        "P2_chunk_step_over_plain": ratio(fused, plain),
        "serial_step_ms": spread(serial),
        "P9_fused_over_serial": ratio(fused, serial),
        "executor": turns["plain"].raincheck.executor,
    }


def answer(model: Any, tokens: int = 512, rounds: int = 3) -> Row:
    """P3: mean TPOT of an answer that restores everything, over full."""
    inputs = _picture(model, 1024)

    def tpot(**fields: Any) -> Callable[[], float]:
        def measure() -> float:
            turn = ours(model, inputs, tokens, **fields)
            assert turn.cache.pending == 0
            return float(turn.raincheck.tpot_ms)

        return measure

    found = interleaved({"full": tpot(retention=1.0), "raincheck": tpot()}, rounds)
    return {
        "full_ms": spread(found["full"]),
        "raincheck_ms": spread(found["raincheck"]),
        "P3_raincheck_over_full": ratio(found["raincheck"], found["full"]),
    }


def first_token(model: Any, rounds: int = 7) -> Row:
    """P4, P5, P6: TTFT at three sizes, selection included."""
    row: Row = {}
    for name, inputs in {
        "1024": _picture(model, 1024),
        "4096": _picture(model, 4096),
        "video": video(model, frames=64, height=16, width=16),
    }.items():
        row |= {
            f"{name}_{key}": value for key, value in _first_token(model, inputs, rounds).items()
        }
        _forget()
    return row


def _first_token(model: Any, inputs: Inputs, rounds: int) -> Row:
    reports: dict[str, list[Any]] = {"full": [], "raincheck": []}

    def whole_call(side: str, **fields: Any) -> Callable[[], float]:
        def measure() -> float:
            spent, turn = elapsed(lambda: ours(model, inputs, 1, **fields))
            reports[side].append(turn.raincheck)
            return spent

        return measure

    calls = interleaved(
        {
            "stock": lambda: elapsed(lambda: stock(model, inputs, 1))[0],
            "full": whole_call("full", retention=1.0),
            "raincheck": whole_call("raincheck"),
        },
        rounds,
    )
    row: Row = {f"{side}_call_ms": spread(times) for side, times in calls.items()}
    ttft = {side: [r.ttft_ms for r in found[1:]] for side, found in reports.items()}
    for side, found in reports.items():
        for part in ("ttft_ms", "vision_ms", "select_ms", "prefill_ms"):
            times = [getattr(r, part) for r in found[1:]]
            row[f"{side}_{part}"] = spread(times)
    row["P4_ttft_over_full"] = ratio(ttft["raincheck"], ttft["full"])
    row["P5_call_over_stock"] = ratio(calls["raincheck"], calls["stock"])
    return row


def memory(model: Any) -> Row:
    """P10: the highest allocation during a turn, over full."""
    row: Row = {}
    for name, inputs in {"1024": _picture(model, 1024), "4096": _picture(model, 4096)}.items():
        peak = {}
        for side, fields in {"full": {"retention": 1.0}, "raincheck": {}}.items():
            ours(model, inputs, 48, **fields)
            _forget()
            if model.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            ours(model, inputs, 48, **fields)
            peak[side] = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            _forget()
        row[f"{name}_full_gib"] = round(peak["full"] / 2**30, 3)
        row[f"P10_{name}_over_full_mib"] = round((peak["raincheck"] - peak["full"]) / 2**20, 1)
    return row


def turns(model: Any, tokens: int = 64) -> Row:
    """Three turns on one picture: TTFT by turn, TPOT, the whole call, and what was restored."""
    row: Row = {}
    inputs = _picture(model, 1024)
    ways: dict[str, dict[str, Any]] = {
        "full": {"retention": 1.0},
        "hard": {"defer": "never"},
        "raincheck": {"completion": "background"},
        "post_answer": {"completion": "background", "defer": "post_answer"},
    }
    for number in range(2):  # the first one warms up
        for side, fields in ways.items():
            cache, given, out = RaincheckCache(model), inputs, None
            for turn in range(3):
                spent, out = elapsed(
                    lambda given=given, cache=cache, fields=fields: ours(  # type: ignore[misc]
                        model, given, tokens, cache=cache, **fields
                    )
                )
                report = out.raincheck
                if number:
                    row[f"{side}_turn{turn + 1}"] = {
                        "ttft_ms": round(report.ttft_ms, 2),
                        "tpot_ms": round(report.tpot_ms, 3),
                        "call_ms": round(spent, 1),
                        "restored_at_end": report.restored_in_answer,
                        "deferred": report.n_deferred,
                    }
                if turn == 0:
                    after, _ = elapsed(cache.finish)
                    if number:
                        row[f"{side}_post_answer_interval_ms"] = round(after, 2)
                given = text_turn(model, out)
            cache.close()
    return row


def _picture(model: Any, tokens: int) -> Inputs:
    side = round(tokens**0.5)
    return prompt(model, side, tokens // side)


def _restoring(report: Any) -> list[float]:
    """Times of the steps that restored a full chunk."""
    largest = max(report.restored_per_step)
    pairs = zip(report.restored_per_step, report.step_ms, strict=True)
    return [spent for restored, spent in pairs if restored == largest]


def _must_match(left: Any, right: Any) -> None:
    apart = _apart(left.logits[1], right.logits[1].float())
    if apart > _AGREED:
        raise RuntimeError(f"the sides' logits differ by {apart:.3f}")


def _apart(logits: torch.Tensor, base: torch.Tensor) -> float:
    return float(f"{float((logits.float() - base.float()).norm() / base.float().norm()):.3g}")


def _stock_step(model: Any, inputs: Inputs) -> float:
    stock(model, inputs, 17)  # warms up
    short = elapsed(lambda: stock(model, inputs, 1))[0]
    long = elapsed(lambda: stock(model, inputs, 17))[0]
    return float(f"{(long - short) / 16:.4g}")


def _device_times(work: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times[2:]


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


MEASURES: dict[str, Callable[[Any], Row]] = {
    "agreement": agreement,
    "steps": steps,
    "answer": answer,
    "first_token": first_token,
    "memory": memory,
    "turns": turns,
}
