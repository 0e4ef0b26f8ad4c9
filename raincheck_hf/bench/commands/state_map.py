"""`raincheck-hf bench state-map`."""

from __future__ import annotations

import argparse
from pathlib import Path

from raincheck_hf.arguments import Commands, Parser, natural, positive, refusing


def add(benches: Commands[Parser]) -> None:
    """Add the subcommand."""
    state_map = benches.add_parser(
        "state-map", help="suffix maps: error and time of the join, and the map's norm and bytes"
    )
    add = state_map.add_argument
    add("--model", default="qwen3_5", help="qwen3_5, a folder, or qwen3_5_9b for random weights")
    add("--suffixes", nargs="+", type=positive, default=[16, 128, 512, 2048], metavar="TOKENS",
        help="[16 128 512 2048]")  # fmt: skip
    add("--length", type=positive, default=4096, help="tokens of the stream [4096]")
    add("--runs", type=positive, default=9, help="timed runs [9]")
    add("--seed", type=natural, default=0)
    add("--device", default="cpu", help="cpu, cuda, cuda:N [cpu]")
    add("--out", type=Path, default=Path("out/state_map.jsonl"), help="rows; resumed if it exists")
    state_map.set_defaults(command=_state_map)


def _state_map(args: argparse.Namespace) -> None:
    import torch

    from raincheck_hf.bench.state_map import Plan, report_state_map
    from raincheck_hf.bench.workers import hush

    hush()
    torch.set_num_threads(1)  # a step is too small to share
    with refusing():
        plan = Plan(
            args.model, tuple(args.suffixes), args.length, args.runs, args.seed, args.device
        )
        report_state_map(plan, args.out)
