"""`raincheck-hf bench judge`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from raincheck_hf.arguments import Commands, Parser, natural, positive, refusing


def add(benches: Commands[Parser]) -> None:
    """Add the subcommand."""
    judge = benches.add_parser("judge", help="have a model at an endpoint score dialogues' answers")
    add = judge.add_argument
    add("--rows", type=Path, required=True, help="what bench dialogues wrote")
    add("--url", required=True, help="an OpenAI-compatible endpoint, such as http://host:8000/v1")
    add("--judge-model", required=True, metavar="NAME", help="as the endpoint calls it")
    add("--out", type=Path, required=True, help="verdicts; resumed if it exists")
    add("--api-key-env", default="OPENAI_API_KEY", metavar="NAME",
        help="environment variable with the key, if one is needed [OPENAI_API_KEY]")  # fmt: skip
    add("--prompts", type=Path, metavar="FOLDER", help="other prompts [the package's]")
    add("--media", type=Path, metavar="FOLDER",
        help="show pictures to the judge, from the data file's folder [text only]")  # fmt: skip
    add("--timeout", type=float, default=120.0, help="seconds a request [120]")
    add("--retries", type=natural, default=4, help="after a request that failed [4]")
    add("--workers", type=positive, default=4, help="requests at a time [4]")
    judge.set_defaults(command=_judge)


def _judge(args: argparse.Namespace) -> None:
    from raincheck_hf.bench.dialogues.endpoint import Endpoint, EndpointError
    from raincheck_hf.bench.dialogues.judge import Judge, Prompts
    from raincheck_hf.bench.dialogues.judging import report_judging

    with refusing():
        if not args.rows.is_file():
            raise ValueError(f"no such file: {args.rows}")
        key = os.environ.get(args.api_key_env)
        endpoint = Endpoint(args.url, args.judge_model, key, args.timeout, args.retries)
        judge = Judge(endpoint, Prompts(args.prompts), args.media)
        try:
            report_judging(judge, args.rows, args.out, args.workers)
        except EndpointError as error:
            raise ValueError(f"{error}; verdicts so far are in {args.out}") from error
