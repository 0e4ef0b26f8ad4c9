"""`raincheck-hf bench sweep`."""

from __future__ import annotations

import argparse
from pathlib import Path

from raincheck_hf.arguments import Commands, Parser, natural, positive, refusing
from raincheck_hf.bench.commands.options import add_boards, add_models, processes_of, settings_of


def add(benches: Commands[Parser]) -> None:
    """Add the subcommand."""
    sweep = benches.add_parser(
        "sweep", help="one choice after the other: retention, chunk, guard, order, ablations"
    )
    add_models(sweep)
    add_boards(sweep, boards=0, reads=20)
    add = sweep.add_argument
    add("--axes", nargs="+", default=[], metavar="AXIS",
        help="retention, chunk_size, guard_tokens, defer, order, correction, visibility [all]",
    )  # fmt: skip
    add("--retentions", nargs="+", type=float, metavar="R", help="[0.1 to 0.7]")
    add("--chunk-sizes", nargs="+", type=positive, metavar="N", help="[7 15 31 63]")
    add("--guards", nargs="+", type=natural, metavar="N", help="[0 8 16 32]")
    add("--selectors", nargs="+", default=["mmtok"], metavar="NAME", help="[mmtok]")
    add("--out", type=Path, default=Path("out/quality.jsonl"), help="rows; resumed if it exists")
    sweep.set_defaults(command=_sweep)


def _sweep(args: argparse.Namespace) -> None:
    from raincheck_hf.bench.sweep import AXES, Sweep, report_sweep
    from raincheck_hf.bench.workers import hush

    hush()
    given = {
        "retention": args.retentions,
        "chunk_size": args.chunk_sizes,
        "guard_tokens": args.guards,
    }
    values = {axis: tuple(some) for axis, some in given.items() if some}
    with refusing():
        settings = settings_of(args, selectors=tuple(args.selectors))
        sweep = Sweep(settings, tuple(args.axes) or AXES, values)
    report_sweep(sweep, args.out, processes_of(args))
