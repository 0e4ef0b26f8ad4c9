"""`raincheck-hf bench memory`."""

from __future__ import annotations

import argparse
from pathlib import Path

from raincheck_hf.arguments import Commands, Parser, natural, positive, refusing
from raincheck_hf.bench.commands.options import add_models


def add(benches: Commands[Parser]) -> None:
    """Add the subcommand."""
    memory = benches.add_parser(
        "memory", help="what full, hard and raincheck hold, by component, at the peak and after"
    )
    add_models(memory)
    add = memory.add_argument
    add("--size", type=positive, nargs=2, default=[12, 12], metavar=("ROWS", "COLS"),
        help="of the picture, in tokens [12 12]")  # fmt: skip
    add("--tokens", type=positive, default=64, help="of the answer [64]")
    add("--selector", default="mmtok", help="a registered selector [mmtok]")
    add("--retention", type=float, default=0.3, help="in (0, 1] [0.3]")
    add("--chunk-size", type=positive, default=31, help="deferred tokens a pass [31]")
    add("--guard-tokens", type=natural, default=16, help="plain passes first [16]")
    add("--seed", type=natural, default=0)
    add("--out", type=Path, default=Path("out/memory.jsonl"), help="rows; resumed if it exists")
    memory.set_defaults(command=_memory)


def _memory(args: argparse.Namespace) -> None:
    import torch

    from raincheck_hf.bench.memory import Plan, report_memory
    from raincheck_hf.bench.workers import hush
    from raincheck_hf.config import RaincheckConfig

    hush()
    torch.set_num_threads(1)  # passes of small models are too small to share
    with refusing():
        config = RaincheckConfig(
            selector=args.selector,
            retention=args.retention,
            chunk_size=args.chunk_size,
            guard_tokens=args.guard_tokens,
            completion="lazy",
        )
        plan = Plan(
            models=tuple(args.model or args.arch),
            size=tuple(args.size),
            tokens=args.tokens,
            config=config,
            seed=args.seed,
            device=args.device,
            dtype=args.dtype,
        )
    report_memory(plan, args.out)
