"""`raincheck-hf bench completion`."""

from __future__ import annotations

import argparse
from pathlib import Path

from raincheck_hf.arguments import Commands, Parser, refusing


def add(benches: Commands[Parser]) -> None:
    """Add the subcommand."""
    completion = benches.add_parser(
        "completion", help="what restoring in the background costs and hides (random weights)"
    )
    add = completion.add_argument
    add("--size", default="qwen3_vl_8b", help="qwen3_vl_8b, qwen3_5_9b, qwen3_vl_small")
    add("--device", default="cuda", help="cpu, cuda, cuda:N [cuda]")
    add("--measures", nargs="+", default=[], metavar="NAME", help="some of them [all]")
    add("--out", type=Path, default=Path("out/completion.jsonl"), help="rows are appended")
    completion.set_defaults(command=_completion)


def _completion(args: argparse.Namespace) -> None:
    from raincheck_hf.bench.completion import run

    with refusing():
        run(args.size, args.device, args.out, args.measures)
