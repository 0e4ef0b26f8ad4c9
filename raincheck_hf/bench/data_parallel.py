"""Conversations spread over processes with `accelerate launch`: each holds a whole model.

`accelerate launch -m raincheck_hf.bench.data_parallel` is what `launch` runs; every process takes
its share, and the first one writes what was gathered.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
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
def share(
    size: str, device: str, side: int, tokens: int, conversations: Iterable[int]
) -> dict[str, Any]:
    """Answer some conversations with a model built for them.

    Args:
        size: A name of `random_weights.SIZES`.
        device: Where the model goes.
        side: Height and width of the picture, in tokens.
        tokens: Length of each answer.
        conversations: Their numbers; a number is a conversation's seed.

    Returns:
        `answers`, the generated ids of each conversation, both turns; `tpot_ms`, the median over
        all decode steps, NaN without any; `memory_gib`, the most that was allocated on a GPU, 0 on
        a CPU.
    """
    from raincheck_hf.bench.wrappers import converse

    torch.manual_seed(0)  # the same weights in every process
    model = enable_raincheck(build(size, device))
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    spoken = [converse(model, side, tokens, seed) for seed in conversations]
    steps = [step for one in spoken for step in one.step_ms]
    return {
        "answers": [one.tokens for one in spoken],
        "tpot_ms": statistics.median(steps) if steps else math.nan,
        "memory_gib": torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else 0.0,
    }


def launch(
    size: str, device: str, side: int, tokens: int, conversations: int, processes: int
) -> dict[str, Any]:
    """Run `main` in several processes.

    Returns:
        `answers`, as `share` gives them, in the order of their numbers; `processes`; and of each
        process, in a list: `of_each_process`, how many it answered, `tpot_ms`, `memory_gib`.

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
        said = share(args.size, device, args.side, args.tokens, mine)
    gathered = gather_object([*zip(mine, said.pop("answers"), strict=True)])
    shares = gather_object([{"of_each_process": len(mine), **said}])
    if state.is_main_process:
        found = {
            "answers": [tokens for _, tokens in sorted(gathered)],
            "processes": state.num_processes,
            **{name: [one[name] for one in shares] for name in shares[0]},
        }
        args.out.write_text(json.dumps(found), encoding="utf-8")
    state.wait_for_everyone()
    state.destroy_process_group()


if __name__ == "__main__":
    main()
