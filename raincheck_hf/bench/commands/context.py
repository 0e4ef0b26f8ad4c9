"""`raincheck-hf bench context`."""

from __future__ import annotations

import argparse
from pathlib import Path

from raincheck_hf.arguments import Commands, Parser, refusing
from raincheck_hf.bench.commands.options import add_boards, add_models, processes_of, settings_of


def add(benches: Commands[Parser]) -> None:
    """Add the subcommand."""
    context = benches.add_parser(
        "context", help="share of the visual tokens that an answer could see, by retention"
    )
    add_models(context)
    add_boards(context, boards=20, reads=20)
    add = context.add_argument
    add("--retentions", nargs="+", type=float, default=[], metavar="R", help="[0.1 to 0.7]")
    add("--selectors", nargs="+", default=["mmtok"], metavar="NAME", help="[mmtok]")
    add("--out", type=Path, default=Path("out/quality.jsonl"), help="rows; resumed if it exists")
    context.set_defaults(command=_context)


def _context(args: argparse.Namespace) -> None:
    from raincheck_hf.bench.context import report_context
    from raincheck_hf.bench.sweep import Sweep
    from raincheck_hf.bench.workers import hush

    hush()
    values = {"retention": tuple(args.retentions)} if args.retentions else {}
    with refusing():
        settings = settings_of(args, selectors=tuple(args.selectors))
        sweep = Sweep(settings, ("retention",), values, baselines=())
    report_context(sweep, args.out, processes_of(args))
