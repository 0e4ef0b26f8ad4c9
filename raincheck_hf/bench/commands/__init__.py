"""`raincheck-hf bench ...`: one file a subcommand, which reads arguments and hands on the work.

A module here has ``add(benches)``. What measures is imported when a command runs, so that the
others start quickly.
"""

from __future__ import annotations

from raincheck_hf.arguments import Commands, Parser
from raincheck_hf.bench.commands import (
    completion,
    context,
    dialogues,
    gaps,
    judge,
    latency,
    memory,
    quality,
    selectors,
    state_map,
    sweep,
    tables,
    wrappers,
)

SUBCOMMANDS = (
    quality,
    sweep,
    context,
    state_map,
    memory,
    gaps,
    completion,
    latency,
    selectors,
    dialogues,
    judge,
    wrappers,
    tables,
)


def add(commands: Commands[Parser]) -> None:
    """Add `bench` with all its subcommands."""
    bench = commands.add_parser("bench", help="measure")
    benches = bench.add_subparsers(required=True, metavar="BENCH", parser_class=Parser)
    for subcommand in SUBCOMMANDS:
        subcommand.add(benches)
