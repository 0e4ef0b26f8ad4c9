"""`raincheck-hf bench memory`: what full, hard and raincheck hold, by component (§A.4)."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.generation import LogitsProcessor

from raincheck_hf.bench.checkpoints import check_device
from raincheck_hf.bench.collect import note_origins, open_rows
from raincheck_hf.bench.environment import provenance
from raincheck_hf.bench.live import COMPONENTS, live_bytes
from raincheck_hf.bench.rows import Row, key_of
from raincheck_hf.bench.settings import Size, point_fields
from raincheck_hf.bench.subjects import Subject, dtype_of, identity, load_subject
from raincheck_hf.bench.tables import Table
from raincheck_hf.bench.ways import config_of
from raincheck_hf.cache import RaincheckCache
from raincheck_hf.config import RaincheckConfig

WAYS = ("full", "hard", "raincheck")
KEY = (
    "bench", "model", "weights", "device", "dtype", "size", "tokens", "seed",
    "retention", "chunk_size", "guard_tokens", "selector", "way",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        models: Small models' names, checkpoints' folders, or keys of `random_weights.SIZES`.
        size: Rows and columns of the picture, in tokens.
        tokens: Of the answer.
        config: What raincheck runs with.
        seed: Fixes the picture.
        device: Where to run.
        dtype: Of the parameters.
    """

    models: tuple[str, ...] = ("qwen3_vl", "qwen3_5")
    size: Size = (12, 12)
    tokens: int = 64
    config: RaincheckConfig = RaincheckConfig(completion="lazy")
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse before anything runs.

        Raises:
            ValueError: Names what is wrong and what is allowed.
        """
        check_device(self.device)
        for model in self.models:
            identity(model)
        if self.config.completion != "lazy":
            raise ValueError("completion must be 'lazy', or it runs while memory is read")


def run_memory(plan: Plan, out: Path) -> list[Row]:
    """Measure what the file does not hold yet.

    Args:
        plan: What to measure.
        out: JSON Lines; created, or added to.

    Returns:
        A row for each model and way, in bytes: `peak`, the components at the step of the answer
        that holds most, between passes; `largest`, each component at its own peak; `steady`, once
        everything is restored and no turn runs; on a GPU also `allocator`, what torch's allocator
        counts at its own peak, inside passes, and in the steady state.
    """
    file = open_rows(out, *KEY)
    origin = provenance(plan.device)
    wanted = []
    for name in plan.models:
        subject = load_subject(name, plan.device, plan.dtype)
        labels = [_label(plan, subject, way) for way in WAYS]
        wanted += [key_of(label, KEY) for label in labels]
        for label in tqdm(labels, desc=name, unit="way", disable=None):
            if key_of(label, KEY) not in file:
                row = {**label, **measure(subject, plan, label["way"]), **origin}
                file.append([row])
        del subject
    return file.rows(wanted)


def report_memory(plan: Plan, out: Path) -> list[Row]:
    """`run_memory`, with a table on the terminal."""
    start = time.monotonic()
    size = "×".join(map(str, plan.size))
    print(
        f"memory: a picture of {size} tokens, an answer of {plan.tokens}, retention "
        f"{plan.config.retention}, {plan.config.selector}, {plan.device}"
    )
    rows = run_memory(plan, out)
    note_origins(rows)
    print(f"\n{memory_table(rows).text()}\n\n{time.monotonic() - start:.0f} s; rows: {out}")
    return rows


def measure(subject: Subject, plan: Plan, way: str) -> dict[str, Any]:
    """One way on one model; see `run_memory`."""
    model = subject.model
    inputs = subject.picture(plan.size, plan.seed)
    cache = RaincheckCache(model)
    watch = _Watch(model, cache)
    on_gpu = plan.device.startswith("cuda")
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model.generate(
        **inputs,
        raincheck=config_of(way, plan.config),
        cache=cache,
        logits_processor=[watch],
        min_new_tokens=plan.tokens,
        max_new_tokens=plan.tokens,
        do_sample=False,
    )
    cache.finish()
    found: dict[str, Any] = {
        "peak": watch.peak,
        "largest": watch.largest,
        "steady": live_bytes(model, cache),
    }
    if on_gpu:
        torch.cuda.synchronize()
        gc.collect()
        found["allocator"] = {
            "peak": torch.cuda.max_memory_allocated(),
            "steady": torch.cuda.memory_allocated(),
        }
    cache.close()
    return found


class _Watch(LogitsProcessor):
    """Reads what is held after each pass; scores pass through unchanged."""

    def __init__(self, model: Any, cache: RaincheckCache) -> None:
        self._model, self._cache = model, cache
        self.peak: dict[str, int] = {}
        self.largest = dict.fromkeys(COMPONENTS, 0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        held = live_bytes(self._model, self._cache)
        if sum(held.values()) > sum(self.peak.values()):
            self.peak = held
        self.largest = {name: max(held[name], self.largest[name]) for name in COMPONENTS}
        return scores


def _label(plan: Plan, subject: Subject, way: str) -> Row:
    return {
        "bench": "memory",
        "model": subject.name,
        "weights": subject.weights,
        "device": plan.device.partition(":")[0],
        "dtype": dtype_of(subject),
        "size": list(plan.size),
        "tokens": plan.tokens,
        "seed": plan.seed,
        **point_fields(way, plan.config),
    }


def memory_table(rows: Sequence[Row]) -> Table:
    """Peak and steady bytes, one line each for a model and way."""
    body = []
    for row in rows:
        for when in ("peak", "steady"):
            held = row[when]
            cells = [f"{held[name] / 2**20:.3f}" for name in COMPONENTS]
            allocator = row.get("allocator")
            cells.append(f"{sum(held.values()) / 2**20:.3f}")
            cells.append(f"{allocator[when] / 2**20:.1f}" if allocator else "-")
            body.append([row["model"], f"{row['way']}, {when}", *cells])
    head = ["model", "when", *COMPONENTS, "all of them", "allocator"]
    return Table(f"MiB held, {rows[0]['dtype']}, {rows[0]['machine']}", head, body)
