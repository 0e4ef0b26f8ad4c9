"""Train a small model: `python -m raincheck_hf.tiny.train --arch qwen3_vl --out DIR`.

Runs on a GPU or, with `--size 3 3`, within minutes on a CPU. The answers are supervised in every
turn; three auxiliary losses, of which nothing is kept but what they taught, make it learn fast:
each visual token names its digit and its cell, the end of a question about a cell already
predicts the answer, and each answer token knows in an inner layer which cell it reads.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers.utils.logging import disable_progress_bar

from raincheck_hf.tiny import boards, configs
from raincheck_hf.tiny.examine import SIZES, accuracy, tasks
from raincheck_hf.tiny.forward import BatchedForward, Handwriting, States
from raincheck_hf.tiny.lessons import IGNORE, Lesson, Teacher
from raincheck_hf.tiny.plans import STAGES, TOKENS, Planner
from raincheck_hf.tiny.processing import build_processor

PASSED = {"cells": ("cell", 0.3), "reading": ("board", 0.4)}
"""A stage is over once the loss of a kind of turn has fallen under a bound."""
LATEST = {"cells": 0.4, "reading": 0.65}
"""Or once this share of the time is gone."""


POINTER_LAYER = 1
"""The text layer after which an answer token knows which cell it reads."""
WEIGHTS = {"digit": 0.5, "name": 0.3, "early": 0.5, "pointer": 0.3}
"""Of the auxiliary losses; the loss on the answers weighs 1."""


class Lessons(IterableDataset):
    """Lessons without end, for a `DataLoader`; `stage` is a shared tensor that may change."""

    def __init__(self, stage: Tensor, seed: int, tokens: int, size: tuple[int, int] | None):
        self._stage, self._seed, self._tokens, self._size = stage, seed, tokens, size

    def __iter__(self) -> Iterator[Lesson]:
        info = get_worker_info()
        torch.set_num_threads(1)
        rng = np.random.default_rng((self._seed, info.id if info else 0))
        teacher = Teacher(build_processor().tokenizer)
        planner = Planner(rng, self._tokens, self._size)
        while True:
            yield teacher.fill(*planner.draw(int(self._stage)), rng)


class Losses(nn.Module):
    """The loss on the answers, and the auxiliary ones.

    Args:
        model: the small model; its word embedding is the classifier of every loss.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self._words = [model.model.language_model.embed_tokens]
        self.sharpness = nn.Parameter(torch.full((2,), 10.0))

    def forward(self, states: States, lesson: Lesson, digits: Tensor) -> dict[str, Tensor]:
        """Every loss by its name; `answer`, [B, A], is not reduced.

        Args:
            states: of the forward pass.
            lesson: what was asked.
            digits: int64 [B, V], the token of the digit behind each visual token.
        """
        words, final = self._words[0].weight, states.final
        answer = _cross_entropy(final[:, lesson.answer_at] @ words.T, lesson.answers)
        first = _unit(states.layers[0][:, lesson.visual]) * self.sharpness[0]
        names = lesson.names.expand(len(first), -1)
        pointer = _unit(states.layers[POINTER_LAYER][:, lesson.answer_at])
        pointer = pointer * self.sharpness[1]
        losses = {
            "answer": answer,
            "digit": _cross_entropy(final[:, lesson.visual] @ words.T, digits).mean(),
            "name": _cross_entropy(first @ words.T, names).mean(),
            "pointer": _cross_entropy(pointer @ words.T, lesson.pointers).mean(),
        }
        if len(lesson.asked_at):
            early = final[:, lesson.asked_at] @ words.T
            losses["early"] = _cross_entropy(early, lesson.asked).mean()
        return losses


def _unit(hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden.float(), hidden.shape[-1:])


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(
        logits.float().flatten(0, 1), target.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return loss.view(target.shape)


class Trainer:
    """One model, its optimiser, and the place it has reached in the curriculum.

    Args:
        arch: the small model's name.
        out: folder that checkpoints are written to.
        seconds: how long to train.
        device: where.
        args: the remaining options of the command line.
    """

    def __init__(self, arch: str, out: Path, seconds: float, device: torch.device, args):
        self._out, self._seconds, self._device, self._args = out, seconds, device, args
        self._processor = build_processor()
        self._model = configs.build_model(
            arch, self._processor.tokenizer, args.seed, args.layers
        ).to(device)
        if args.resume:
            weights = load_file(args.resume / "model.safetensors")
            self._model.load_state_dict(weights, strict=False)
        self._forward = BatchedForward(self._model.train(), args.compile)
        self._plain_forward = BatchedForward(self._model)
        self._losses = Losses(self._model).to(device)
        self._pictures = Handwriting().to(device)
        self._stage = torch.tensor(args.stage).share_memory_()
        self._mean: dict[str, float] = {}
        digit = self._processor.tokenizer.convert_tokens_to_ids([str(d) for d in range(10)])
        labels = torch.from_numpy(np.array(digit)[boards.digits()[1]]).to(device)
        self._digit_token = labels
        params = [*self._model.parameters(), *self._losses.parameters()]
        decayed = [p for p in params if p.ndim > 1]
        other = [p for p in params if p.ndim < 2]
        self._optimiser = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.05}, {"params": other, "weight_decay": 0.0}],
            lr=args.lr,
            betas=(0.9, 0.98),
            fused=device.type == "cuda",
        )
        self._params = params

    def run(self) -> None:
        """Train until the time is up, with progress lines and checkpoints."""
        dataset = Lessons(self._stage, self._args.seed, self._args.tokens, self._args.size)
        workers = self._args.workers
        loader = DataLoader(dataset, batch_size=None, num_workers=workers)
        begin = said = saved = time.monotonic()
        for step, lesson in enumerate(loader):
            share = (time.monotonic() - begin) / self._seconds
            if share >= 1:
                break
            self._step(lesson.to(self._device), step, share)
            now = time.monotonic()
            if step == 0:
                begin = said = saved = now
            if now - said > self._args.report:
                said = now
                self._report(step, now - begin)
                self._advance(share)
            if now - saved > self._args.checkpoint:
                saved = now
                print(f"held-out {self.examine(16)}", flush=True)
                self.save()
        self._report(step, time.monotonic() - begin)
        print(f"held-out {self.examine(32)}", flush=True)
        self.save()

    def save(self) -> None:
        """Write a checkpoint."""
        configs.save(self._model, self._processor, self._out)

    def examine(self, batch: int) -> dict[str, float]:
        """Teacher-forced accuracy on held-out boards, per kind of question and size."""
        teacher = Teacher(self._processor.tokenizer, "held_out")
        rng, scores = np.random.default_rng(0), {}
        for size in [self._args.size] if self._args.size else SIZES:
            for name, plan in tasks(*size).items():
                lesson = teacher.fill(plan, batch, rng)
                with self._autocast():
                    score = accuracy(
                        self._plain_forward, self._pictures, lesson, plan.turns[0].kind
                    )
                scores[name] = round(score, 3)
        return scores

    def _step(self, lesson: Lesson, step: int, share: float) -> None:
        for group in self._optimiser.param_groups:
            warm = min(1.0, (step + 1) / self._args.warmup)
            group["lr"] = self._args.lr * warm * (0.02 + 0.49 * (1 + math.cos(math.pi * share)))
        with self._autocast():
            patches, index = self._pictures.draw(lesson.cells, distort=True)
            states = self._forward(lesson, patches, index)
            losses = self._losses(states, lesson, self._digit_token[lesson.cells])
        total = losses["answer"].mean() + sum(
            weight * losses[name] for name, weight in WEIGHTS.items() if name in losses
        )
        self._optimiser.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(self._params, 1.0)
        self._optimiser.step()
        if step % 5 == 0:
            self._note(lesson, losses)

    def _note(self, lesson: Lesson, losses: dict[str, Tensor]) -> None:
        seen = defaultdict(list)
        for kind, loss in zip(lesson.kinds, losses["answer"].mean(0).tolist(), strict=True):
            seen[kind].append(loss)
        seen |= {name: [loss.item()] for name, loss in losses.items() if name != "answer"}
        if lesson.plan.boards > 1:
            video = lesson.plan.video_fps is not None
            seen["frames" if video else "boards"] = seen.pop("cell", [])
        for kind, values in seen.items():
            if values:
                value = sum(values) / len(values)
                self._mean[kind] = 0.8 * self._mean.get(kind, value) + 0.2 * value

    def _advance(self, share: float) -> None:
        name = STAGES[int(self._stage)]
        if name not in PASSED:
            return
        kind, bound = PASSED[name]
        if self._mean.get(kind, 9.0) < bound or share > LATEST[name]:
            self._stage += 1
            print(f"-> {STAGES[int(self._stage)]}", flush=True)

    def _report(self, step: int, seconds: float) -> None:
        means = " ".join(f"{kind} {value:.3f}" for kind, value in sorted(self._mean.items()))
        stage = STAGES[int(self._stage)]
        print(f"{seconds:6.0f} s  step {step:6d}  {stage}: {means}", flush=True)

    def _autocast(self):
        return torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", choices=configs.NAMES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--seconds", type=float, default=500, help="how long to train")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, nargs=2, help="teach boards of R C cells only")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens a batch")
    parser.add_argument("--lr", type=float, default=6e-4, help="highest learning rate")
    parser.add_argument("--warmup", type=int, default=100, help="steps to reach it")
    parser.add_argument("--workers", type=int, default=4, help="processes that write lessons")
    parser.add_argument("--report", type=float, default=10, help="seconds between lines")
    parser.add_argument("--checkpoint", type=float, default=60, help="seconds between saves")
    parser.add_argument("--resume", type=Path, help="folder of a model to go on from")
    parser.add_argument("--stage", type=int, default=0, help="where in the curriculum to begin")
    parser.add_argument(
        "--layers",
        default=configs.QWEN3_5_LAYERS,
        help="text layers of qwen3_5: G is a gated delta rule, F is full attention",
    )
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.size = tuple(args.size) if args.size else None
    torch.backends.cuda.matmul.allow_tf32 = True
    torch._dynamo.config.cache_size_limit = 64
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()
    Trainer(args.arch, args.out, args.seconds, torch.device(args.device), args).run()


if __name__ == "__main__":
    main()
