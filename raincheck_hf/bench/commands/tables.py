"""`raincheck-hf bench tables`."""

from __future__ import annotations

import argparse
from pathlib import Path

from raincheck_hf.arguments import Commands, Parser, refusing


def add(benches: Commands[Parser]) -> None:
    """Add the subcommand."""
    tables = benches.add_parser("tables", help="tables of rows that were measured, as Markdown")
    tables.add_argument("files", type=Path, nargs="+", metavar="FILE", help="JSON Lines")
    tables.add_argument(
        "--into", type=Path, metavar="PAGE",
        help="fill the places <!-- table NAME --> ... <!-- end --> of a document",
    )  # fmt: skip
    tables.set_defaults(command=_tables)


def _tables(args: argparse.Namespace) -> None:
    from raincheck_hf.bench.pages import fill, tables_of

    with refusing():
        tables = tables_of(args.files)
        if args.into is not None:
            print(f"filled in {args.into}: {', '.join(fill(args.into, tables))}")
            return
    for name, some in tables.items():
        for table in some:
            print(f"<!-- {name} -->\n{table.markdown()}\n")
