"""`raincheck-hf bench wrappers`."""

from __future__ import annotations

import argparse
from pathlib import Path

from raincheck_hf.arguments import Commands, Parser, positive, refusing


def add(benches: Commands[Parser]) -> None:
    """Add the subcommand."""
    wrappers = benches.add_parser(
        "wrappers", help="a model over two devices, conversations over two processes"
    )
    add = wrappers.add_argument
    add("--size", default="qwen3_vl_8b",
        help="qwen3_vl_8b, qwen3_5_9b, qwen3_vl_small, qwen3_5_small [qwen3_vl_8b]")  # fmt: skip
    add("--device", default="cuda", help="cuda (two GPUs), or cpu (and the disk) [cuda]")
    add("--measures", nargs="+", default=[], metavar="NAME",
        help="device_map, data_parallel [all]")  # fmt: skip
    add("--side", type=positive, default=32, help="of the picture, in tokens [32]")
    add("--tokens", type=positive, default=48, help="of each answer [48]")
    add("--conversations", type=positive, default=8, help="over two processes [8]")
    add("--out", type=Path, default=Path("out/wrappers.jsonl"), help="rows are appended")
    wrappers.set_defaults(command=_wrappers)


def _wrappers(args: argparse.Namespace) -> None:
    from raincheck_hf.bench.workers import hush
    from raincheck_hf.bench.wrappers import MEASURES, Plan, run

    hush()
    with refusing():
        plan = Plan(
            size=args.size,
            device=args.device,
            measures=tuple(args.measures) or MEASURES,
            side=args.side,
            tokens=args.tokens,
            conversations=args.conversations,
        )
    run(plan, args.out)
