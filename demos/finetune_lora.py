"""Teach a small model another form of answer, and ask it through raincheck.

`python demos/finetune_lora.py`, after `pip install peft`; a few minutes on two CPU cores.

The small models name the digit in a cell, and nothing else. A LoRA adapter learns to put a full
stop behind it, with PEFT and transformers' own `Trainer`. The model is enabled before it is wrapped
and trained: training is stock, and the adapter's layers run in every raincheck pass. Held-out
boards are asked about before training, with the adapter, after merging it, and after loading what
was saved.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments

from raincheck_hf import RaincheckConfig, RaincheckSession, enable_raincheck, tiny
from raincheck_hf.tiny.boards import QA, Board, make_board

WAYS = {
    "full": RaincheckConfig(retention=1.0),
    "hard": RaincheckConfig(selector="uniform", defer="never"),
    "raincheck": RaincheckConfig(selector="uniform", completion="blocking"),
}
_SIDE = 8
_IGNORED = -100  # labels that the loss leaves out


def ask_with_stop(board: Board, rng: np.random.Generator) -> QA:
    """The question about a random cell, with the answer to learn."""
    question, digit = board.ask_random_cell(rng)
    return QA(question, f"{digit}.")


@dataclass(frozen=True)
class Lesson:
    """A board and what is asked about it."""

    board: Board
    asked: tuple[QA, ...]

    def messages(self) -> list[dict[str, Any]]:
        """As a conversation, the picture in its first message."""
        messages: list[dict[str, Any]] = []
        for question, answer in self.asked:
            content: list[dict[str, Any]] = [{"type": "text", "text": question}]
            if not messages:
                content.insert(0, {"type": "image", "image": self.board.image()})
            messages += [
                {"role": "user", "content": content},
                {"role": "assistant", "content": [{"type": "text", "text": answer}]},
            ]
        return messages


class Lessons(torch.utils.data.Dataset):
    """Lessons drawn from the training pictures; item i is the same every time."""

    def __init__(self, count: int, seed: int, questions: int = 8) -> None:
        self._count, self._seed, self._questions = count, seed, questions

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Lesson:
        rng = np.random.default_rng((self._seed, index))
        board = make_board(_SIDE, _SIDE, rng, split="train")
        return Lesson(board, tuple(ask_with_stop(board, rng) for _ in range(self._questions)))


class Collator:
    """Lessons to model inputs, with labels for what the assistant says and the end of it."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        tokenizer = processor.tokenizer
        self._opening = tokenizer.encode("<|im_start|>assistant\n")
        self._end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def __call__(self, lessons: Sequence[Lesson]) -> dict[str, torch.Tensor]:
        inputs = self._processor.apply_chat_template(
            [lesson.messages() for lesson in lessons],
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        )
        labels = torch.full_like(inputs["input_ids"], _IGNORED)
        for row, ids in enumerate(inputs["input_ids"].tolist()):
            for start in self._answers(ids):
                stop = ids.index(self._end, start) + 1
                labels[row, start:stop] = inputs["input_ids"][row, start:stop]
        return {**inputs, "labels": labels}

    def _answers(self, ids: list[int]) -> list[int]:
        """Where the assistant's turns begin."""
        size = len(self._opening)
        return [
            at + size for at in range(len(ids) - size + 1) if ids[at : at + size] == self._opening
        ]


def train(model: Any, processor: Any, args: argparse.Namespace, folder: Path) -> list[float]:
    """Train with transformers' Trainer; returns the losses that it logged."""
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=args.lr,
            lr_scheduler_type="cosine",
            warmup_steps=args.steps // 20,
            gradient_checkpointing=args.gradient_checkpointing,
            logging_steps=max(1, args.steps // 10),
            seed=args.seed,
            use_cpu=args.device == "cpu",
            dataloader_pin_memory=False,
            remove_unused_columns=False,  # lessons are no dictionaries
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Lessons(args.steps * args.batch, args.seed),
        data_collator=Collator(processor),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def examine(model: Any, processor: Any, boards: int) -> dict[str, Any]:
    """Ask about three cells of each of some held-out boards, in every way.

    Returns:
        `said`, by way: all answers, three a board; `right`, by way: the share of right ones among
        those of turns 2 and 3.
    """
    model.eval()
    said: dict[str, list[str]] = {}
    right: dict[str, float] = {}
    for way, config in WAYS.items():
        said[way], marks = [], []
        for seed in range(boards):
            rng = np.random.default_rng(seed)
            board = make_board(_SIDE, _SIDE, rng)
            session = RaincheckSession(model, processor, config)
            for turn in range(3):
                question, answer = ask_with_stop(board, rng)
                images = [] if turn else [board.image()]
                said[way].append(session.ask(question, images=images, max_new_tokens=4))
                marks += [said[way][-1] == answer] if turn else []
            session.close()
        right[way] = float(np.mean(marks))
    return {"said": said, "right": right}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, examine, save, merge and examine again; prints a table.

    Returns:
        `losses`; and for `before`, `adapter`, `merged` and `loaded`, what `examine` found.
    """
    args = _arguments().parse_args(argv)
    torch.manual_seed(args.seed)
    model, processor = tiny.load(args.model, device=args.device)
    enable_raincheck(model)
    found: dict[str, Any] = {"before": examine(model, processor, args.boards)}
    lora = LoraConfig(r=args.rank, target_modules="all-linear", exclude_modules=".*visual.*")
    adapted = get_peft_model(model, lora)
    adapted.print_trainable_parameters()
    with tempfile.TemporaryDirectory() as folder:
        found["losses"] = train(adapted, processor, args, Path(folder))
    found["adapter"] = examine(adapted, processor, args.boards)
    adapted.save_pretrained(args.out / "adapter")
    merged = adapted.merge_and_unload()
    found["merged"] = examine(merged, processor, args.boards)
    merged.save_pretrained(args.out / "merged")
    processor.save_pretrained(args.out / "merged")
    loaded = AutoModelForImageTextToText.from_pretrained(args.out / "merged", dtype=torch.float32)
    found["loaded"] = examine(loaded.to(args.device), processor, args.boards)
    (args.out / "results.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print("loss", " ".join(f"{loss:.3f}" for loss in found["losses"]))
    print("share of right answers in turns 2 and 3\n" + " " * 9, *(f"{way:>9}" for way in WAYS))
    for stage in ("before", "adapter", "merged", "loaded"):
        print(f"{stage:9}", *(f"{found[stage]['right'][way]:9.3f}" for way in WAYS))
    return found


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=tiny.NAMES, default="qwen3_vl")
    parser.add_argument("--steps", type=int, default=40, help="of the optimiser [40]")
    parser.add_argument("--batch", type=int, default=4, help="boards a step [4]")
    parser.add_argument("--boards", type=int, default=8, help="held-out boards to ask about [8]")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter [8]")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate [2e-3]")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="and leave it on")
    parser.add_argument("--device", default="cpu", help="cpu or cuda [cpu]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/lora"), help="folder [out/lora]")
    return parser


if __name__ == "__main__":
    main()
