"""`raincheck-hf bench selectors`."""

from __future__ import annotations

import argparse
from pathlib import Path

from raincheck_hf.arguments import MODELS, Commands, Parser, positive, refusing


def add(benches: Commands[Parser]) -> None:
    """Add the subcommand."""
    selectors = benches.add_parser(
        "selectors", help="selectors: time, agreement with plain loops, accuracy, overlap, pictures"
    )
    add = selectors.add_argument
    add("--parts", nargs="+", default=[], metavar="PART",
        help="speed, report, overlap, accuracy, pictures [all]")  # fmt: skip
    add("--selectors", nargs="+", default=[], metavar="NAME", help="[all that are registered]")
    add("--sizes", nargs="+", type=positive, default=[256, 1024], metavar="TOKENS",
        help="of the timed inputs, powers of 4 [256 1024]")  # fmt: skip
    add("--arch", nargs="+", choices=MODELS, default=list(MODELS), help="small models [both]")
    add("--retention", type=float, default=0.3, help="in (0, 1] [0.3]")
    add("--boards", type=positive, default=20, help="for accuracy and overlap [20]")
    add("--runs", type=positive, default=9, help="timed runs of a selection [9]")
    add("--device", default="cpu", help="cpu, cuda, cuda:N [cpu]")
    add("--dtype", default="float32", help="of the timed inputs [float32]")
    add("--out", type=Path, default=Path("out/selectors.jsonl"), help="rows; resumed if it exists")
    selectors.set_defaults(command=_selectors)


def _selectors(args: argparse.Namespace) -> None:
    import torch

    from raincheck_hf.bench.selectors import PARTS, Plan, report_selectors
    from raincheck_hf.bench.workers import hush

    hush()
    torch.set_num_threads(1)  # two timings on a CPU are compared, and passes are small
    with refusing():
        plan = Plan(
            parts=tuple(args.parts) or PARTS,
            selectors=tuple(args.selectors),
            sizes=tuple(args.sizes),
            models=tuple(args.arch),
            retention=args.retention,
            boards=args.boards,
            runs=args.runs,
            device=args.device,
            dtype=args.dtype,
            pictures=args.out.parent,
        )
    report_selectors(plan, args.out)
