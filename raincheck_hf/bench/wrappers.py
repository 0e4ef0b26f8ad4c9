"""`raincheck-hf bench wrappers`: one conversation over two devices, many over two processes.

Random weights take every path that trained ones take, so real sizes need no download. Each figure
is a row of JSON Lines with the card, versions and commit.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from torch import Tensor

from raincheck_hf import RaincheckConfig, enable_raincheck
from raincheck_hf.bench import data_parallel
from raincheck_hf.bench.checkpoints import check_device
from raincheck_hf.bench.environment import provenance, version
from raincheck_hf.bench.random_weights import SIZES, build, prompt, text_turn

CONFIG = RaincheckConfig(selector="uniform", guard_tokens=4, executor="modules")
MEASURES = ("device_map", "data_parallel")
_GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        size: A name of `random_weights.SIZES`.
        device: `"cuda"`, for two GPUs; or `"cpu"`, where the second device is the disk.
        measures: Names of `MEASURES`.
        side: Height and width of the picture, in tokens.
        tokens: Length of each answer.
        conversations: How many are spread over two processes.

    Raises:
        ValueError: An unknown name, or fewer than two GPUs.
    """

    size: str
    device: str = "cuda"
    measures: tuple[str, ...] = MEASURES
    side: int = 32
    tokens: int = 48
    conversations: int = 8

    def __post_init__(self) -> None:
        unknown = set(self.measures) - set(MEASURES)
        if unknown:
            raise ValueError(f"unknown measures {sorted(unknown)}; known: {', '.join(MEASURES)}")
        if self.size not in SIZES:
            raise ValueError(f"unknown size {self.size!r}; known: {', '.join(SIZES)}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, got {self.device!r}")
        if self.device == "cuda":
            check_device("cuda:1")


@dataclass(frozen=True)
class Spoken:
    """What two turns of a conversation gave.

    Attributes:
        tokens: Generated ids, both turns.
        logits: fp32 [tokens, vocabulary] on the CPU.
        ttft_ms: Of each turn.
        step_ms: Of each decode step, both turns.
    """

    tokens: list[int]
    logits: Tensor
    ttft_ms: list[float]
    step_ms: list[float]


def run(plan: Plan, out: Path) -> list[dict[str, Any]]:
    """Measure, append the rows to ``out`` and print each."""
    origin = {"model": plan.size, "device": plan.device, **provenance(plan.device)}
    origin["versions"]["accelerate"] = version("accelerate")
    rows = []
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in plan.measures:
        started = time.perf_counter()
        figures = device_map(plan) if name == "device_map" else spread(plan)
        row = {"measure": name, **figures, "seconds": time.perf_counter() - started, **origin}
        rows.append(row)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    return rows


def device_map(plan: Plan) -> dict[str, Any]:
    """The same conversation on one device, and with the layers split over two."""
    torch.manual_seed(0)
    model = enable_raincheck(build(plan.size, plan.device))
    whole, memory = _measured(model, plan)
    with tempfile.TemporaryDirectory() as folder:
        places = split(model, plan.device)
        dispatch_model(model, places, offload_dir=folder, force_hooks=True)
        halves, memory_of_halves = _measured(model, plan)
    return {
        "same_tokens": whole.tokens == halves.tokens,
        "max_logit_difference": float((whole.logits - halves.logits).abs().max()),
        "max_logit": float(whole.logits.abs().max()),
        "modules_by_place": {
            str(place): sum(1 for there in places.values() if there == place)
            for place in dict.fromkeys(places.values())
        },
        "one": {**_times(whole), "memory_gib": memory},
        "split": {**_times(halves), "memory_gib": memory_of_halves},
    }


def split(model: Any, device: str) -> dict[str, Any]:
    """A device map that puts about half of the weights on each of two places."""
    whole = list(model._no_split_modules or ())
    if device == "cpu":
        total = sum(p.numel() * p.element_size() for p in model.parameters())
        memory: dict[Any, int] = {"cpu": total // 2, "disk": 2 * total}
    else:
        free = {index: torch.cuda.mem_get_info(index)[1] for index in (0, 1)}
        memory = get_balanced_memory(model, max_memory=free, no_split_module_classes=whole)
        memory.pop("cpu", None)
    return infer_auto_device_map(model, max_memory=memory, no_split_module_classes=whole)


def spread(plan: Plan) -> dict[str, Any]:
    """Conversations in one process, and over two by `accelerate launch` with results gathered."""
    started = time.perf_counter()
    alone = data_parallel.answers(plan.size, plan.device, plan.side, plan.tokens,
                                  range(plan.conversations))  # fmt: skip
    alone_seconds = time.perf_counter() - started
    gc.collect()  # an enabled model refers to itself
    if plan.device == "cuda":
        torch.cuda.empty_cache()
    started = time.perf_counter()
    gathered = data_parallel.launch(
        plan.size, plan.device, plan.side, plan.tokens, plan.conversations, processes=2
    )
    return {
        "conversations": plan.conversations,
        "processes": gathered["processes"],
        "of_each_process": gathered["of_each_process"],
        "same_answers": gathered["answers"] == alone,
        "one_process_seconds": alone_seconds,
        "two_processes_seconds": time.perf_counter() - started,
    }


def converse(model: Any, side: int, tokens: int, seed: int = 0) -> Spoken:
    """A turn about a picture and a follow-up, greedy; the rest is restored between them."""
    inputs = prompt(model, side, side, seed=seed)
    said: list[int] = []
    logits, ttft, steps = [], [], []
    cache: Any = None
    for turn in range(2):
        out = model.generate(
            **inputs, raincheck=CONFIG, cache=cache, do_sample=False, max_new_tokens=tokens,
            min_new_tokens=tokens, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        cache = out.cache
        cache.finish(timeout=120)
        said += out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        logits += [one.float().cpu() for one in out.logits]
        ttft.append(out.raincheck.ttft_ms)
        steps += out.raincheck.step_ms
        inputs = text_turn(model, out, seed=seed + 1 + turn)
    cache.close()
    return Spoken(said, torch.cat(logits), ttft, steps)


def _measured(model: Any, plan: Plan) -> tuple[Spoken, dict[str, Any]]:
    """The conversation once warm, and GiB of weights and at the peak on each GPU."""
    converse(model, plan.side, plan.tokens)
    if plan.device == "cpu":
        return converse(model, plan.side, plan.tokens), {}
    torch.cuda.empty_cache()
    cards = range(2)
    before = {card: torch.cuda.memory_allocated(card) / _GIB for card in cards}
    for card in cards:
        torch.cuda.reset_peak_memory_stats(card)
    spoken = converse(model, plan.side, plan.tokens)
    return spoken, {
        f"cuda:{card}": {
            "weights": before[card],
            "peak": torch.cuda.max_memory_allocated(card) / _GIB,
        }
        for card in cards
    }


def _times(spoken: Spoken) -> dict[str, Any]:
    p20, p50, p80 = torch.tensor(spoken.step_ms).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    return {"tpot_ms": {"p20": p20, "p50": p50, "p80": p80}, "ttft_ms": spoken.ttft_ms}
