"""`raincheck-hf bench wrappers`: one conversation over two devices, many over two processes.

Random weights take every path that trained ones take, so real sizes need no download. Each figure
is a row of JSON Lines with the card, versions and commit. Two controls stand beside a model that is
split: the same split under stock ``generate``, and what rounding alone does on one device.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory

from raincheck_hf import RaincheckConfig, enable_raincheck
from raincheck_hf.bench import data_parallel, two_cards
from raincheck_hf.bench.checkpoints import check_device
from raincheck_hf.bench.divergence import Say, Spoken, compare
from raincheck_hf.bench.environment import provenance, version
from raincheck_hf.bench.random_weights import SIZES, build, prompt, text_turn
from raincheck_hf.bench.reproducible import reproducible

CONFIG = RaincheckConfig(selector="uniform", guard_tokens=4, executor="modules")
# All of D is left for after the first answer.
AFTER = CONFIG.replace(defer="post_answer")
MEASURES = ("device_map", "data_parallel")
# How a conversation is run on one device and split; None is stock ``generate``.
WAYS: dict[str, RaincheckConfig | None] = {
    "decode": CONFIG,
    "background": AFTER.replace(completion="background"),
    "blocking": AFTER.replace(completion="blocking"),
    "stock": None,
}
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


@reproducible()
def device_map(plan: Plan) -> dict[str, Any]:
    """The same conversations on one device, and with the layers split over two.

    Those on two devices say the tokens of those on one, so that all their logits can be compared.

    Returns:
        ``devices``, as ``two_cards.examine`` says; ``weights_arrived``, whether those that were
        moved are the same bits; ``split``, by way, what splitting changed; ``again``, by way, what
        running on one device twice changed, and by ``split``, on two devices twice; ``rounding``,
        what other shapes of the same sums change on one device. Times and memory of way ``decode``.
    """
    second = "cuda:1" if plan.device == "cuda" else "cpu"
    torch.manual_seed(0)
    model = enable_raincheck(build(plan.size, plan.device))
    devices = two_cards.examine(plan.device, second, model.dtype)
    converse(model, plan.side, plan.tokens)  # warm
    with _memory(plan) as memory:
        whole = {"decode": converse(model, plan.side, plan.tokens)}
    others = [name for name in WAYS if name not in whole]
    for name in others:
        whole[name] = converse(model, plan.side, plan.tokens, way=WAYS[name])
    again = {
        name: compare(said, _repeated(model, plan, said, name)) for name, said in whole.items()
    }
    serial = converse(model, plan.side, plan.tokens, way=CONFIG.replace(fuse=False),
                      say=whole["decode"].answers)  # fmt: skip
    sums = two_cards.checksums(model)
    with tempfile.TemporaryDirectory() as folder:
        places = split(model, plan.device)
        dispatch_model(model, places, offload_dir=folder, force_hooks=True)
        moved = two_cards.checksums(model)
        _repeated(model, plan, whole["decode"], "decode")  # warm
        with _memory(plan) as memory_of_halves:
            halves = {"decode": _repeated(model, plan, whole["decode"], "decode")}
        for name in others:
            halves[name] = _repeated(model, plan, whole[name], name)
        again["split"] = compare(
            halves["decode"], _repeated(model, plan, whole["decode"], "decode")
        )
    return {
        "devices": devices,
        "weights_arrived": all(sums[name] == bits for name, bits in moved.items()),
        "split": {name: compare(whole[name], halves[name]) for name in whole},
        "again": again,
        "rounding": compare(whole["decode"], serial),
        "left_after_the_answer": {name: said.pending for name, said in halves.items()},
        "max_logit": max(float(each.abs().max()) for each in whole["decode"].logits),
        "modules_by_place": {
            str(place): sum(1 for there in places.values() if there == place)
            for place in dict.fromkeys(places.values())
        },
        "one": {**_times(whole["decode"]), "memory_gib": memory},
        "two": {**_times(halves["decode"]), "memory_gib": memory_of_halves},
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
    alone = data_parallel.share(
        plan.size, plan.device, plan.side, plan.tokens, range(plan.conversations)
    )
    alone_seconds = time.perf_counter() - started
    gc.collect()  # an enabled model refers to itself
    if plan.device == "cuda":
        torch.cuda.empty_cache()
    started = time.perf_counter()
    gathered = data_parallel.launch(
        plan.size, plan.device, plan.side, plan.tokens, plan.conversations, processes=2
    )
    pairs = zip(gathered.pop("answers"), alone.pop("answers"), strict=True)
    differing = [number for number, (one, other) in enumerate(pairs) if one != other]
    return {
        "conversations": plan.conversations,
        "same_answers": not differing,
        "differing": differing,
        "one": alone,
        "two": gathered,
        "one_process_seconds": alone_seconds,
        "two_processes_seconds": time.perf_counter() - started,
    }


def converse(
    model: Any,
    side: int,
    tokens: int,
    seed: int = 0,
    way: RaincheckConfig | None = CONFIG,
    say: list[list[int]] | None = None,
) -> Spoken:
    """A turn about a picture and a follow-up, greedy; the rest is restored between them.

    Args:
        model: An enabled model.
        side: Height and width of the picture, in tokens.
        tokens: Length of each answer.
        seed: Of the inputs.
        way: How it runs; None for stock ``generate``, which reads everything again in turn 2.
        say: Answers to give in place of the model's own.
    """
    inputs = _typed(model, prompt(model, side, side, seed=seed), way)
    picture = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
    spoken = Spoken([], [], [], [], [])
    cache: Any = None
    for turn in range(2):
        own = {"raincheck": False} if way is None else {"raincheck": way, "cache": cache}
        forced = [] if say is None else [Say(say[turn])]
        out = model.generate(
            **inputs, **own, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
            logits_processor=forced, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        spoken.answers.append(out.sequences[0, inputs["input_ids"].shape[1] :].tolist())
        spoken.logits.append(torch.cat([one.float().cpu() for one in out.logits]))
        inputs = text_turn(model, out, seed=seed + 1 + turn)
        if way is None:
            inputs = _typed(model, {**picture, **inputs}, way)
            continue
        cache, report = out.cache, out.raincheck
        spoken.pending.append(report.n_deferred - report.restored_in_answer)
        cache.finish(timeout=120)
        spoken.ttft_ms.append(report.ttft_ms)
        spoken.step_ms.extend(report.step_ms)
    if cache is not None:
        cache.close()
    how = "stock" if way is None else f"defer={way.defer}, completion={way.completion}"
    print(f"two turns of {tokens} tokens, {how}", file=sys.stderr, flush=True)
    return spoken


def _typed(model: Any, inputs: dict[str, Any], way: RaincheckConfig | None) -> dict[str, Any]:
    """With the type of each token, which stock ``generate`` asks for beside a picture."""
    if way is not None:
        return inputs
    types = (inputs["input_ids"] == model.config.image_token_id).int()
    return {**inputs, "mm_token_type_ids": types}


def _repeated(model: Any, plan: Plan, said: Spoken, name: str) -> Spoken:
    return converse(model, plan.side, plan.tokens, way=WAYS[name], say=said.answers)


@contextmanager
def _memory(plan: Plan) -> Iterator[dict[str, Any]]:
    """Filled at the end with GiB of weights and at the peak on each GPU; empty on a CPU."""
    found: dict[str, Any] = {}
    if plan.device == "cpu":
        yield found
        return
    torch.cuda.empty_cache()
    cards = range(2)
    before = {card: torch.cuda.memory_allocated(card) / _GIB for card in cards}
    for card in cards:
        torch.cuda.reset_peak_memory_stats(card)
    yield found
    for card in cards:
        peak = torch.cuda.max_memory_allocated(card) / _GIB
        found[f"cuda:{card}"] = {"weights": before[card], "peak": peak}


def _times(spoken: Spoken) -> dict[str, Any]:
    p20, p50, p80 = torch.tensor(spoken.step_ms).quantile(torch.tensor([0.2, 0.5, 0.8])).tolist()
    return {"tpot_ms": {"p20": p20, "p50": p50, "p80": p80}, "ttft_ms": spoken.ttft_ms}
