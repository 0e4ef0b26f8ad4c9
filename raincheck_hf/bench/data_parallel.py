"""Conversations spread over processes with `accelerate launch`: each holds a whole model.

`accelerate launch -m raincheck_hf.bench.data_parallel` is what `launch` runs; every process takes
its share, and the first one writes what was gathered.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from raincheck_hf import enable_raincheck
from raincheck_hf.bench.random_weights import build
from raincheck_hf.bench.reproducible import reproducible


@reproducible()
def answers(
    size: str, device: str, side: int, tokens: int, conversations: Iterable[int]
) -> list[list[int]]:
    """Generated ids of each conversation, both turns.

    Args:
        size: A name of `random_weights.SIZES`.
        device: Where the model goes.
        side: Height and width of the picture, in tokens.
        tokens: Length of each answer.
        conversations: Their numbers; a number is a conversation's seed.
    """
    from raincheck_hf.bench.wrappers import converse

    torch.manual_seed(0)  # the same weights in every process
    model = enable_raincheck(build(size, device))
    return [converse(model, side, tokens, seed).tokens for seed in conversations]


def launch(
    size: str, device: str, side: int, tokens: int, conversations: int, processes: int
) -> dict[str, Any]:
    """Run `main` in several processes.

    Returns:
        `answers`, as `answers` gives them, in the order of their numbers; `processes`; and
        `of_each_process`, how many each of them answered.

    Raises:
        RuntimeError: A process failed; ends with what it wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "gathered.json"
        command = [
            # Of accelerate's launchers this one starts several processes, on a CPU too.
            sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu",
            "--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no",
            "--dynamo_backend", "no", "--main_process_port", "0",
            "-m", "raincheck_hf.bench.data_parallel", "--size", size, "--device", device,
            "--side", str(side), "--tokens", str(tokens), "--conversations", str(conversations),
            "--out", str(out),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"accelerate launch failed:\n{done.stderr[-3000:]}")
        return json.loads(out.read_text(encoding="utf-8"))


def main() -> None:
    """One process of several."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", required=True)
    parser.add_argument("--device", required=True)
    for name in ("side", "tokens", "conversations"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    state = PartialState(cpu=args.device == "cpu")
    device = str(state.device)
    with state.split_between_processes(list(range(args.conversations))) as mine:
        said = answers(args.size, device, args.side, args.tokens, mine)
    gathered = gather_object([*zip(mine, said, strict=True)])
    counts = gather_object([len(mine)])
    if state.is_main_process:
        found = {
            "answers": [tokens for _, tokens in sorted(gathered)],
            "processes": state.num_processes,
            "of_each_process": counts,
        }
        args.out.write_text(json.dumps(found), encoding="utf-8")
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    main()
