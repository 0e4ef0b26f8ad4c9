"""The command `raincheck-hf`: reads arguments, and leaves the work to others."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

MODELS = ("qwen3_vl", "qwen3_5")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, and exit code 2; `--help` has the rest."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; None takes the process's own.

    Returns:
        The exit code: 0, or 2 for arguments that cannot be used, or 130 after Ctrl-C.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    command: Callable[[argparse.Namespace], None] = args.command
    try:
        command(args)
    except BadArguments as error:
        print(f"raincheck-hf: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    return 0


class BadArguments(Exception):
    """Arguments that parse, and cannot be used."""


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = _Parser(prog="raincheck-hf", description="Deferred multimodal prefill: try, measure.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    env = commands.add_parser("env", help="print a paste-ready block for bug reports")
    env.set_defaults(command=_env)
    demo = commands.add_parser("demo", help="show it on the small models, without any download")
    demo.add_argument("--out", type=Path, default=Path("out"), help="folder for pictures [out]")
    demo.add_argument("--boards", type=_positive, default=16, help="boards for the table [16]")
    demo.add_argument("--selector", default="mmtok", help="a registered selector [mmtok]")
    demo.add_argument("--seed", type=_natural, default=0)
    demo.set_defaults(command=_demo)
    bench = commands.add_parser("bench", help="measure")
    benches = bench.add_subparsers(required=True, metavar="BENCH", parser_class=_Parser)
    _add_quality(benches)
    _add_completion(benches)
    _add_selectors(benches)
    chat = commands.add_parser("chat", help="talk to a model about pictures, in the terminal")
    chat.add_argument("--model", default="qwen3_5", help=f"{', '.join(MODELS)}, or a folder")
    chat.add_argument("--device", default="cpu")
    chat.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16 [auto]")
    chat.add_argument("--selector", default="mmtok", help="a registered selector [mmtok]")
    chat.add_argument("--retention", type=float, default=0.3, help="in (0, 1] [0.3]")
    chat.add_argument("--max-new-tokens", type=_positive, default=512, help="an answer [512]")
    chat.set_defaults(command=_chat)
    return parser


def _add_quality(benches: argparse._SubParsersAction[_Parser]) -> None:
    quality = benches.add_parser(
        "quality", help="accuracy of full, hard and raincheck with matched selections"
    )
    add = quality.add_argument
    add("--arch", nargs="+", choices=MODELS, default=list(MODELS), help="small models [both]")
    add("--model", action="append", help="a checkpoint's folder, instead of the small models")
    add("--selectors", nargs="+", default=["uniform", "random"], metavar="NAME")
    add("--ways", nargs="+", default=[], metavar="WAY", help="beside full [all that apply]")
    add("--boards", type=_natural, default=200, help="boards for questions about cells [200]")
    add("--turns", type=_positive, default=4, help="such questions a board [4]")
    add("--size", type=_positive, nargs=2, default=[8, 8], metavar=("ROWS", "COLS"))
    add("--reads", type=_natural, default=40, help="boards read as a whole [40]")
    add("--read-size", type=_positive, nargs=2, default=[12, 12], metavar=("ROWS", "COLS"))
    add("--retention", type=float, default=0.3, help="in (0, 1] [0.3]")
    add("--chunk-size", type=_positive, default=31, help="deferred tokens a pass [31]")
    add("--guard-tokens", type=_natural, default=16, help="plain passes first [16]")
    add("--seed", type=_natural, default=0)
    add("--device", default="cpu", help="cpu, cuda, cuda:N [cpu]")
    add("--dtype", default="float32", help="float32, bfloat16, float16 [float32]")
    add("--processes", type=_positive, help="[one a CPU core for small models on a CPU, or 1]")
    add("--out", type=Path, default=Path("out/quality.jsonl"), help="rows; resumed if it exists")
    quality.set_defaults(command=_quality)


def _add_completion(benches: argparse._SubParsersAction[_Parser]) -> None:
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

    try:
        run(args.size, args.device, args.out, args.measures)
    except ValueError as error:
        raise BadArguments(str(error)) from error


def _add_selectors(benches: argparse._SubParsersAction[_Parser]) -> None:
    selectors = benches.add_parser(
        "selectors", help="selectors: time, agreement with plain loops, accuracy, overlap, pictures"
    )
    add = selectors.add_argument
    add("--parts", nargs="+", default=[], metavar="PART",
        help="speed, report, overlap, accuracy, pictures [all]")  # fmt: skip
    add("--selectors", nargs="+", default=[], metavar="NAME", help="[all that are registered]")
    add("--sizes", nargs="+", type=_positive, default=[256, 1024], metavar="TOKENS",
        help="of the timed inputs, powers of 4 [256 1024]")  # fmt: skip
    add("--arch", nargs="+", choices=MODELS, default=list(MODELS), help="small models [both]")
    add("--retention", type=float, default=0.3, help="in (0, 1] [0.3]")
    add("--boards", type=_positive, default=20, help="for accuracy and overlap [20]")
    add("--runs", type=_positive, default=9, help="timed runs of a selection [9]")
    add("--device", default="cpu", help="cpu, cuda, cuda:N [cpu]")
    add("--dtype", default="float32", help="of the timed inputs [float32]")
    add("--out", type=Path, default=Path("out/selectors.jsonl"), help="rows; resumed if it exists")
    selectors.set_defaults(command=_selectors)


def _selectors(args: argparse.Namespace) -> None:
    import torch

    from raincheck_hf.bench.selectors import PARTS, Plan, report_selectors
    from raincheck_hf.bench.workers import hush

    hush()
    torch.set_num_threads(1)  # two timings on a CPU are compared, and passes are small
    try:
        plan = Plan(
            parts=tuple(args.parts) or PARTS,
            selectors=tuple(args.selectors),
            sizes=tuple(args.sizes),
            models=tuple(args.arch),
            retention=args.retention,
            boards=args.boards,
            runs=args.runs,
            device=args.device,
            dtype=args.dtype,
            pictures=args.out.parent,
        )
    except ValueError as error:
        raise BadArguments(error) from error
    report_selectors(plan, args.out)


def _env(args: argparse.Namespace) -> None:
    from raincheck_hf.bench.environment import block

    print(block())


def _demo(args: argparse.Namespace) -> None:
    import torch

    from raincheck_hf.bench.workers import hush
    from raincheck_hf.demo import run_demo

    _check_selector(args.selector)
    hush()
    torch.set_num_threads(1)  # passes of these models are too small to share
    run_demo(args.out, args.boards, args.selector, args.seed)


def _quality(args: argparse.Namespace) -> None:
    from raincheck_hf.bench.quality import report_quality
    from raincheck_hf.bench.settings import Settings
    from raincheck_hf.bench.workers import hush

    hush()
    try:
        settings = Settings(
            models=tuple(args.model or args.arch),
            selectors=tuple(args.selectors),
            boards=args.boards,
            turns=args.turns,
            size=tuple(args.size),
            reads=args.reads,
            read_size=tuple(args.read_size),
            retention=args.retention,
            chunk_size=args.chunk_size,
            guard_tokens=args.guard_tokens,
            seed=args.seed,
            device=args.device,
            dtype=args.dtype,
            only=tuple(args.ways),
        )
    except ValueError as error:
        raise BadArguments(error) from error
    alone = args.model or args.device != "cpu"
    processes = args.processes or (1 if alone else os.cpu_count() or 1)
    report_quality(settings, args.out, processes)


def _chat(args: argparse.Namespace) -> None:
    from raincheck_hf.bench.checkpoints import load
    from raincheck_hf.bench.workers import hush
    from raincheck_hf.config import RaincheckConfig
    from raincheck_hf.demo.chat import HELP, Chat, prompt_lines
    from raincheck_hf.session import RaincheckSession

    hush()
    try:
        config = RaincheckConfig(selector=args.selector, retention=args.retention)
        model, processor = load(args.model, args.device, args.dtype)
    except ValueError as error:
        raise BadArguments(error) from error
    print(f"{args.model}, {args.device}\n{HELP}")
    session = RaincheckSession(model, processor, config)
    Chat(session, lambda text: print(text, end="", flush=True), args.max_new_tokens).run(
        prompt_lines()
    )


def _check_selector(name: str) -> None:
    from raincheck_hf.selection import get_selector

    try:
        get_selector(name)
    except ValueError as error:
        raise BadArguments(error) from error


def _positive(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(low: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise argparse.ArgumentTypeError(f"must be a whole number, {low} or more; got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
