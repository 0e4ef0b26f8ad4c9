"""`raincheck-hf bench dialogues`."""

from __future__ import annotations

import argparse
from pathlib import Path

from raincheck_hf.arguments import MODELS, Commands, Parser, natural, positive, refusing


def add(benches: Commands[Parser]) -> None:
    """Add the subcommand."""
    dialogues = benches.add_parser(
        "dialogues", help="full, hard and raincheck on multi-turn dialogues from a file"
    )
    add = dialogues.add_argument
    add("--data", type=Path, required=True, help="dialogues as JSON Lines, see docs/dialogues.md")
    add("--model", default=MODELS[0], help=f"{', '.join(MODELS)}, or a folder [{MODELS[0]}]")
    add("--mode", type=names, default=("full", "hard", "raincheck"), metavar="NAMES",
        help="joined by commas [full,hard,raincheck]")  # fmt: skip
    add("--selector", type=names, default=("mmtok",), metavar="NAMES", help="likewise [mmtok]")
    add("--retention", type=float, default=0.3, help="in (0, 1] [0.3]")
    add("--chunk-size", type=positive, default=31, help="deferred tokens a pass [31]")
    add("--guard-tokens", type=natural, default=16, help="plain passes first [16]")
    add("--max-new-tokens", type=positive, default=512, help="of turns that do not say it [512]")
    add("--limit", type=positive, help="only so many dialogues from the start [all]")
    add("--seed", type=natural, default=0, help="of selectors that draw [0]")
    add("--device", default="cpu", help="cpu, cuda, cuda:N [cpu]")
    add("--dtype", default="float32", help="auto, float32, bfloat16, float16 [float32]")
    add("--out", type=Path, default=Path("out/dialogues.jsonl"), help="rows; resumed if it exists")
    dialogues.set_defaults(command=_dialogues)


def names(text: str) -> tuple[str, ...]:
    """`a,b` as a tuple, without repetition."""
    return tuple(dict.fromkeys(name for name in text.split(",") if name))


def _dialogues(args: argparse.Namespace) -> None:
    import torch

    from raincheck_hf.bench.checkpoints import load
    from raincheck_hf.bench.dialogues.plan import Plan
    from raincheck_hf.bench.dialogues.report import report_dialogues
    from raincheck_hf.bench.workers import hush

    hush()
    if args.model in MODELS and args.device == "cpu":
        torch.set_num_threads(1)  # passes of these models are too small to share
    with refusing():
        plan = Plan(
            data=args.data,
            model=args.model,
            ways=args.mode,
            selectors=args.selector,
            retention=args.retention,
            chunk_size=args.chunk_size,
            guard_tokens=args.guard_tokens,
            max_new_tokens=args.max_new_tokens,
            seed=args.seed,
            limit=args.limit,
            device=args.device,
            dtype=args.dtype,
        )
        model, processor = load(args.model, args.device, args.dtype)
    report_dialogues(plan, model, processor, args.out)
