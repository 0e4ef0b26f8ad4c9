"""`raincheck-hf plot`."""

from __future__ import annotations

import argparse
from pathlib import Path

from raincheck_hf.arguments import BadArguments, Commands, Parser, refusing


def add(commands: Commands[Parser]) -> None:
    """Add the command."""
    plot = commands.add_parser("plot", help="pictures of rows that `bench` has written")
    plot.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSON Lines")
    plot.add_argument("--out", type=Path, default=Path("out"), help="folder for pictures [out]")
    plot.set_defaults(command=_plot)


def _plot(args: argparse.Namespace) -> None:
    from raincheck_hf.bench.plot import draw

    try:
        with refusing():
            written = draw(args.files, args.out)
    except ImportError as error:
        raise BadArguments(f"{error} (pip install 'raincheck_hf[demo]')") from error
    for path in written:
        print(f"written: {path}")
