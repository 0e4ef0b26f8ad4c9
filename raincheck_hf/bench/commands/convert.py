"""`raincheck-hf convert`: dialogues from published benchmarks, and about boards."""

from __future__ import annotations

import argparse
from pathlib import Path

from raincheck_hf.arguments import Commands, Parser, natural, positive, refusing

_SOURCES = {
    "multiverse": "the dataset's folder, or one of its parquet files",
    "convbench": "the repository's folder",
    "mt-video-bench": "the folder with mtqa, checklist and videos",
}


def add(commands: Commands[Parser]) -> None:
    """Add the command with its subcommands."""
    convert = commands.add_parser("convert", help="make a file of dialogues for bench dialogues")
    kinds = convert.add_subparsers(required=True, metavar="KIND", parser_class=Parser)
    for name, source in _SOURCES.items():
        kind = kinds.add_parser(name, help=f"from {source}")
        kind.add_argument("src", type=Path, metavar="SRC", help=source)
        kind.add_argument("--skip-missing", action="store_true",
                          help="leave out dialogues whose media are not there")  # fmt: skip
        kind.add_argument("--out", type=Path, required=True, help="a new data file")
        kind.set_defaults(command=_convert, kind=name)
    boards = kinds.add_parser("boards", help="the boards that bench quality asks about")
    boards.add_argument("--boards", type=positive, default=50, help="how many [50]")
    boards.add_argument("--turns", type=positive, default=4, help="questions a board [4]")
    boards.add_argument("--size", type=positive, nargs=2, default=[8, 8], metavar=("ROWS", "COLS"))
    boards.add_argument("--task", default="cells", help="cells, or reading, whose first turn is "
                        "the whole board [cells]")  # fmt: skip
    boards.add_argument("--seed", type=natural, default=0)
    boards.add_argument("--out", type=Path, required=True, help="a new data file")
    boards.set_defaults(command=_boards)


def _convert(args: argparse.Namespace) -> None:
    from raincheck_hf.bench.dialogues.converters import convert
    from raincheck_hf.bench.dialogues.format import write_dialogues

    with refusing():
        conversion = convert(args.kind, args.src, args.out, args.skip_missing)
        count = write_dialogues(args.out, conversion.dialogues)
    for note in conversion.notes:
        print(f"note: {note}")
    print(f"{count} dialogues: {args.out}")


def _boards(args: argparse.Namespace) -> None:
    from raincheck_hf.bench.dialogues.boards import board_dialogues
    from raincheck_hf.bench.dialogues.format import refuse_existing, write_dialogues

    with refusing():
        refuse_existing(args.out)
        size = (args.size[0], args.size[1])
        made = board_dialogues(args.out, args.boards, args.turns, size, args.task, args.seed)
        count = write_dialogues(args.out, made)
    print(f"{count} dialogues: {args.out}")
