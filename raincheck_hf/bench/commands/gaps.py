"""`raincheck-hf bench gaps`."""

from __future__ import annotations

import argparse
from pathlib import Path

from raincheck_hf.arguments import Commands, Parser, natural, positive, refusing
from raincheck_hf.bench.commands.options import add_models


def add(benches: Commands[Parser]) -> None:
    """Add the subcommand."""
    gaps = benches.add_parser(
        "gaps", help="how many follow-ups would wait for completion, given intervals between turns"
    )
    add = gaps.add_argument
    add("intervals", type=Path, metavar="FILE",
        help='an interval a line, in seconds: a number, or {"seconds": 1.5}')  # fmt: skip
    add_models(gaps)
    add("--rate", type=float, help="tokens completed a second [the model's, measured]")
    add("--pending", type=natural, nargs="+", default=[], metavar="TOKENS",
        help="left when the answer ended [all that is deferred]")  # fmt: skip
    add("--size", type=positive, nargs=2, default=[12, 12], metavar=("ROWS", "COLS"),
        help="of the picture, in tokens [12 12]")  # fmt: skip
    add("--retention", type=float, default=0.3, help="in (0, 1] [0.3]")
    add("--seed", type=natural, default=0)
    add("--out", type=Path, default=Path("out/gaps.jsonl"), help="rows; resumed if it exists")
    gaps.set_defaults(command=_gaps)


def _gaps(args: argparse.Namespace) -> None:
    import torch

    from raincheck_hf.bench.gaps import Plan, report_gaps
    from raincheck_hf.bench.workers import hush

    hush()
    torch.set_num_threads(1)  # passes of small models are too small to share
    with refusing():
        plan = Plan(
            intervals=args.intervals,
            models=tuple(args.model or args.arch),
            rate=args.rate,
            pending=tuple(args.pending),
            size=tuple(args.size),
            retention=args.retention,
            seed=args.seed,
            device=args.device,
            dtype=args.dtype,
        )
    report_gaps(plan, args.out)
