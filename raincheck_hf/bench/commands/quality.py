"""`raincheck-hf bench quality`."""

from __future__ import annotations

import argparse
from pathlib import Path

from raincheck_hf.arguments import Commands, Parser, refusing
from raincheck_hf.bench.commands.options import add_boards, add_models, processes_of, settings_of


def add(benches: Commands[Parser]) -> None:
    """Add the subcommand."""
    quality = benches.add_parser(
        "quality", help="accuracy of full, hard and raincheck with matched selections"
    )
    add_models(quality)
    add_boards(quality, boards=200, reads=20)
    add = quality.add_argument
    add("--selectors", nargs="+", default=[], metavar="NAME", help="[all that are for pictures]")
    add("--ways", nargs="+", default=[], metavar="WAY", help="beside full [a task's own]")
    add("--out", type=Path, default=Path("out/quality.jsonl"), help="rows; resumed if it exists")
    quality.set_defaults(command=_quality)


def _quality(args: argparse.Namespace) -> None:
    from raincheck_hf.bench.quality import report_quality
    from raincheck_hf.bench.settings import SELECTORS
    from raincheck_hf.bench.workers import hush

    hush()
    with refusing():
        selectors = tuple(args.selectors) or SELECTORS
        settings = settings_of(args, selectors=selectors, only=tuple(args.ways))
    report_quality(settings, args.out, processes_of(args))
