"""Held-out accuracy: `python -m raincheck_hf.tiny.examine --arch qwen3_vl`.

Answers are teacher-forced: every digit is predicted from the right ones before it. For an answer
of one digit that is what greedy `generate` gives.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from raincheck_hf.tiny import configs, folder, load
from raincheck_hf.tiny.boards import FIRST_HELD_OUT
from raincheck_hf.tiny.forward import BatchedForward, Handwriting
from raincheck_hf.tiny.lessons import Lesson, Plan, Teacher, Turn

SIZES = ((8, 8), (12, 12))
OTHER_SIZES = ((4, 4), (5, 8), (10, 6), (8, 12), (10, 10), (16, 16))


def tasks(rows: int, cols: int) -> dict[str, Plan]:
    """The questions about one board, each as a plan that asks nothing else."""

    def ask(kind: str, times: int) -> Plan:
        return Plan(rows, cols, (Turn(kind, shown=1), *[Turn(kind)] * (times - 1)))

    size = f"{rows}x{cols}"
    return {
        f"cell {size}": ask("cell", 8),
        f"row {size}": ask("row", 4),
        f"column {size}": ask("column", 4),
        f"board {size}": ask("board", 1),
    }


def further_tasks(rows: int, cols: int) -> dict[str, Plan]:
    """Several boards, a board in a later turn, a long answer before the question, video."""
    size = f"{rows}x{cols}"
    named = (Turn("cell", 1, named=True), Turn("cell", 0, named=True), Turn("cell", 2, named=True))
    first = Turn("cell", 2, shown=3, named=True)
    return {
        f"of board 1 to 3, {size}": Plan(rows, cols, (first, *named)),
        f"of frame 1 to 3, {size}": Plan(rows, cols, (first, *named), video_fps=24.0),
        f"second board in turn 3, {size}": Plan(
            rows, cols, (Turn("cell", 0, 1), Turn("cell"), Turn("cell", 1, 1), Turn("cell", 1))
        ),
        f"cells after a read board, {size}": Plan(
            rows, cols, (Turn("board", 0, 1), Turn("cell"), Turn("cell"))
        ),
    }


@torch.no_grad()
def accuracy(
    forward: BatchedForward, pictures: Handwriting, lesson: Lesson, kind: str = "cell"
) -> float:
    """Share of right digits among the answers to questions of one kind."""
    device = pictures.cells.device
    lesson = lesson.to(device)
    patches, index = pictures.draw(lesson.cells, distort=False)
    states = forward(lesson, patches, index)
    words = forward.text.embed_tokens.weight
    guess = (states.final[:, lesson.answer_at].float() @ words.float().T).argmax(-1)
    of_kind = torch.tensor([other == kind for other in lesson.kinds], device=device)
    return (guess == lesson.answers)[:, of_kind].float().mean().item()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", choices=configs.NAMES, required=True)
    parser.add_argument("--boards", type=int, default=32, help="boards for each line")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--weights", type=Path, help="another folder than the shipped one")
    args = parser.parse_args()
    model, processor = load(args.arch, device=args.device)
    if args.weights:
        model = type(model).from_pretrained(args.weights, dtype=torch.float32).to(args.device)
    forward, pictures = BatchedForward(model), Handwriting().to(args.device)
    teacher, rng = Teacher(processor.tokenizer, "held_out"), np.random.default_rng(0)
    plans = {}
    for size in (*SIZES, *OTHER_SIZES):
        plans |= tasks(*size)
    for size in SIZES:
        plans |= further_tasks(*size)
    print(f"{args.weights or folder(args.arch).name}, digits from {FIRST_HELD_OUT} on")
    for name, plan in plans.items():
        kind = name.split()[0] if name.split()[0] in ("row", "column", "board") else "cell"
        score = accuracy(forward, pictures, teacher.fill(plan, args.boards, rng), kind)
        print(f"{name:32} {score:.3f}", flush=True)


if __name__ == "__main__":
    main()
