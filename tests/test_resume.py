"""An evaluation of 13-turn dialogues that is killed goes on, and ends with the same numbers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raincheck_hf.cli import main
from raincheck_hf.tiny import NAMES

TURNS = 13
SEED = int(os.environ.get("RAINCHECK_KILL_SEED", "0"))  # another seed kills elsewhere
# Of a row, what another run on the same machine does not repeat.
TIMES = {"ttft_ms", "tpot_ms"}

Command = Callable[[Path], list[str]]


def raincheck(*arguments: object) -> list[str]:
    return [str(argument) for argument in arguments]


def run(command: list[str]) -> None:
    """In this process, which has loaded already what takes long to load."""
    assert main(command) == 0


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_at(command: list[str], rows: Path, count: int, delay: float) -> int:
    """Start, and kill once the file has so many rows and a moment more has passed."""
    program = [sys.executable, "-m", "raincheck_hf.cli", *command]
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 600
    while lines(rows) < count and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    time.sleep(delay)
    process.kill()
    return process.wait()


def read(path: Path) -> list[dict[str, Any]]:
    """Rows without times; a line that a kill cut short is none."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows.append({name: value for name, value in row.items() if name not in TIMES})
    return rows


def dialogues(model: str, folder: Path) -> Command:
    """`bench dialogues`, which writes a row a turn, on a board and 13 questions."""
    data = folder / "boards.jsonl"
    run(raincheck("convert", "boards", "--boards", 1, "--turns", TURNS, "--size", 4, 4,
        "--out", data))  # fmt: skip
    return lambda out: raincheck(
        "bench", "dialogues", "--data", data, "--model", model, "--mode", "full,hard,raincheck",
        "--selector", "uniform", "--out", out,
    )  # fmt: skip


def quality(model: str, folder: Path) -> Command:
    """`bench quality`, which writes a row a conversation, of 13 turns."""
    return lambda out: raincheck(
        "bench", "quality", "--arch", model, "--boards", 3, "--turns", TURNS, "--size", 4, 4,
        "--reads", 0, "--selectors", "random", "--ways", "hard", "raincheck",
        "--processes", 1, "--out", out,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "model"),
    [(dialogues, NAMES[0]), (dialogues, NAMES[1]), (quality, NAMES[1])],
    ids=lambda part: getattr(part, "__name__", part),
)
@pytest.mark.timeout(900)  # a process is started, and two evaluations run
def test_a_killed_evaluation_ends_with_the_same_numbers(
    kind: Callable[[str, Path], Command], model: str, tmp_path: Path
) -> None:
    command = kind(model, tmp_path)
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    run(command(whole))
    total = lines(whole)
    draw = random.Random(f"{SEED} {kind.__name__} {model}")
    count, delay = draw.randrange(1, total - 1), draw.uniform(0, 0.2)
    print(f"seed {SEED}: killed {delay:.3f} s after row {count} of {total}")

    assert kill_at(command(cut), cut, count, delay) == -9
    left = cut.read_bytes()
    assert count <= left.count(b"\n") < total  # in the middle of it
    assert not cut.with_suffix(".summary.json").exists()

    run(command(cut))
    assert cut.read_bytes().startswith(left)  # added to, never rewritten
    assert lines(cut) <= total + 1  # nothing twice; a row that was cut short stays where it is
    key = {json.dumps(row, sort_keys=True) for row in read(whole)}
    assert {json.dumps(row, sort_keys=True) for row in read(cut)} == key and len(key) == total
    summaries = [path.with_suffix(".summary.json").read_bytes() for path in (whole, cut)]
    assert summaries[0] == summaries[1]
    if kind is dialogues:
        turns = [row["turn"] for row in read(cut)]
        assert all(turns.count(turn) == 3 for turn in range(1, TURNS + 1))
    else:
        assert all(len(row["said"]) == TURNS for row in read(cut))
