"""`raincheck-hf bench latency`."""

from __future__ import annotations

import argparse
from pathlib import Path

from raincheck_hf.arguments import Commands, Parser, refusing


def add(benches: Commands[Parser]) -> None:
    """Add the subcommand."""
    latency = benches.add_parser(
        "latency", help="time to first token and per token, at real sizes (random weights)"
    )
    add = latency.add_argument
    add("--size", default="qwen3_vl_8b", help="qwen3_vl_8b, qwen3_5_9b, qwen3_vl_small")
    add("--device", default="cuda", help="cpu, cuda, cuda:N [cuda]")
    add("--measures", nargs="+", default=[], metavar="NAME", help="some of them [all]")
    add("--out", type=Path, default=Path("out/latency.jsonl"), help="rows are appended")
    latency.set_defaults(command=_latency)


def _latency(args: argparse.Namespace) -> None:
    from raincheck_hf.bench.latency import run

    with refusing():
        run(args.size, args.device, args.out, args.measures)
