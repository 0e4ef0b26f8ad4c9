"""The command `raincheck-hf`: reads arguments, and leaves the work to others."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from raincheck_hf.arguments import MODELS, BadArguments, Parser, natural, positive, refusing
from raincheck_hf.bench import commands as bench
from raincheck_hf.bench.commands import convert, plot


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


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = Parser(prog="raincheck-hf", description="Deferred multimodal prefill: try, measure.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    env = commands.add_parser("env", help="print a paste-ready block for bug reports")
    env.set_defaults(command=_env)
    demo = commands.add_parser("demo", help="show it on the small models, without any download")
    demo.add_argument("--out", type=Path, default=Path("out"), help="folder for pictures [out]")
    demo.add_argument("--boards", type=positive, default=16, help="boards for the table [16]")
    demo.add_argument("--selector", default="mmtok", help="a registered selector [mmtok]")
    demo.add_argument("--seed", type=natural, default=0)
    demo.set_defaults(command=_demo)
    bench.add(commands)
    convert.add(commands)
    plot.add(commands)
    chat = commands.add_parser("chat", help="talk to a model about pictures, in the terminal")
    chat.add_argument("--model", default="qwen3_5", help=f"{', '.join(MODELS)}, or a folder")
    chat.add_argument("--device", default="cpu")
    chat.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16 [auto]")
    chat.add_argument("--selector", default="mmtok", help="a registered selector [mmtok]")
    chat.add_argument("--retention", type=float, default=0.3, help="in (0, 1] [0.3]")
    chat.add_argument("--max-new-tokens", type=positive, default=512, help="an answer [512]")
    chat.set_defaults(command=_chat)
    return parser


def _env(args: argparse.Namespace) -> None:
    from raincheck_hf.bench.environment import block

    print(block())


def _demo(args: argparse.Namespace) -> None:
    import torch

    from raincheck_hf.bench.workers import hush
    from raincheck_hf.demo import run_demo
    from raincheck_hf.selection import get_selector

    with refusing():
        get_selector(args.selector)
    hush()
    torch.set_num_threads(1)  # passes of these models are too small to share
    run_demo(args.out, args.boards, args.selector, args.seed)


def _chat(args: argparse.Namespace) -> None:
    from raincheck_hf.bench.checkpoints import load
    from raincheck_hf.bench.workers import hush
    from raincheck_hf.config import RaincheckConfig
    from raincheck_hf.demo.chat import HELP, Chat, prompt_lines
    from raincheck_hf.session import RaincheckSession

    hush()
    with refusing():
        config = RaincheckConfig(selector=args.selector, retention=args.retention)
        model, processor = load(args.model, args.device, args.dtype)
    print(f"{args.model}, {args.device}\n{HELP}")
    session = RaincheckSession(model, processor, config)
    Chat(session, lambda text: print(text, end="", flush=True), args.max_new_tokens).run(
        prompt_lines()
    )


if __name__ == "__main__":
    sys.exit(main())
