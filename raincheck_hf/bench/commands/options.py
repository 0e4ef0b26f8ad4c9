"""Options that subcommands on boards share."""

from __future__ import annotations

import argparse
import os
from typing import Any

from raincheck_hf.arguments import MODELS, Parser, natural, positive


def add_models(parser: Parser) -> None:
    """Which models, and where they run."""
    add = parser.add_argument
    add("--arch", nargs="+", choices=MODELS, default=list(MODELS), help="small models [both]")
    add("--model", action="append", help="a checkpoint's folder, instead of the small models")
    add("--device", default="cpu", help="cpu, cuda, cuda:N [cpu]")
    add("--dtype", default="float32", help="float32, bfloat16, float16 [float32]")


def add_boards(parser: Parser, boards: int, reads: int) -> None:
    """Which boards are asked about, and how raincheck runs; with default numbers of boards."""
    add = parser.add_argument
    add("--boards", type=natural, default=boards, help=f"boards asked about cells [{boards}]")
    add("--turns", type=positive, default=4, help="such questions a board [4]")
    add("--size", type=positive, nargs=2, default=[8, 8], metavar=("ROWS", "COLS"))
    add("--reads", type=natural, default=reads, help=f"boards read in the first turn [{reads}]")
    add("--read-turns", type=positive, default=4, help="turns about these, cells at the end [4]")
    add("--read-size", type=positive, nargs=2, default=[12, 12], metavar=("ROWS", "COLS"))
    add("--retention", type=float, default=0.3, help="in (0, 1] [0.3]")
    add("--chunk-size", type=positive, default=31, help="deferred tokens a pass [31]")
    add("--guard-tokens", type=natural, default=16, help="plain passes first [16]")
    add("--seed", type=natural, default=0)
    add("--processes", type=positive, help="[one a CPU core for small models on a CPU, or 1]")


def settings_of(args: argparse.Namespace, **more: Any) -> Any:
    """`Settings` from the options above.

    Raises:
        ValueError: They do not go together.
    """
    from raincheck_hf.bench.settings import Settings

    return Settings(
        models=tuple(args.model or args.arch),
        boards=args.boards,
        turns=args.turns,
        size=tuple(args.size),
        reads=args.reads,
        read_turns=args.read_turns,
        read_size=tuple(args.read_size),
        retention=args.retention,
        chunk_size=args.chunk_size,
        guard_tokens=args.guard_tokens,
        seed=args.seed,
        device=args.device,
        dtype=args.dtype,
        **more,
    )


def processes_of(args: argparse.Namespace) -> int:
    """How many processes share the work: a large model or a GPU is not loaded twice."""
    alone = args.model or args.device != "cpu"
    return args.processes or (1 if alone else os.cpu_count() or 1)
