"""What is measured without asking about quality: a checkpoint, or random weights of a real size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from raincheck_hf.bench import checkpoints, random_weights
from raincheck_hf.generation import enable_raincheck
from raincheck_hf.tiny.boards import Board, make_board


@dataclass(frozen=True)
class Subject:
    """A model and how to make inputs for it.

    Attributes:
        name: As it was asked for.
        weights: Tells checkpoints under one name apart; `"random"` for random weights.
        model: Enabled, in eval mode.
        processor: None for random weights.
    """

    name: str
    weights: str
    model: Any
    processor: Any

    def picture(self, size: tuple[int, int], seed: int) -> dict[str, Tensor]:
        """Inputs of one turn about one picture of rows × columns tokens."""
        if self.processor is None:
            return random_weights.prompt(self.model, *size, seed=seed)
        board = make_board(*size, np.random.default_rng(seed))
        return self._processed([board], answered=False)

    def stream(self, length: int, seed: int) -> dict[str, Tensor]:
        """Inputs of at least ``length`` tokens: boards that are read, one after the other."""
        if self.processor is None:
            text = 64
            width = 64
            height = -(-(length - text) // width)
            return random_weights.prompt(self.model, height, width, text=text, seed=seed)
        rng = np.random.default_rng(seed)
        boards: list[Board] = []
        while True:
            boards += [make_board(12, 12, rng) for _ in range(4)]
            inputs = self._processed(boards, answered=True)
            if inputs["input_ids"].shape[1] >= length:
                return inputs

    def _processed(self, boards: Sequence[Board], answered: bool) -> dict[str, Tensor]:
        messages = []
        for board in boards:
            asked = board.ask_board()
            content = [{"type": "image"}, {"type": "text", "text": asked.question}]
            messages.append({"role": "user", "content": content})
            if answered:
                answer = [{"type": "text", "text": asked.answer}]
                messages.append({"role": "assistant", "content": answer})
        text = self.processor.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not answered
        )
        images = [board.image() for board in boards]
        inputs = self.processor(text=[text], images=images, return_tensors="pt")
        return dict(inputs.to(self.model.device))


def identity(name: str) -> str:
    """Which weights stand under a name, without loading them.

    Raises:
        ValueError: There is no such model.
    """
    return "random" if name in random_weights.SIZES else checkpoints.fingerprint(name)


def load_subject(name: str, device: str, dtype: str) -> Subject:
    """A small model, a checkpoint's folder, or random weights of a size by name.

    Args:
        name: As in `checkpoints.locate`, or a key of `random_weights.SIZES`.
        device: Where it goes.
        dtype: Of the parameters; random weights have bf16 on a GPU and fp32 elsewhere.

    Raises:
        ValueError: There is no such model, device or dtype.
    """
    if name in random_weights.SIZES:
        checkpoints.check_device(device)
        model = enable_raincheck(random_weights.build(name, device))
        return Subject(name, identity(name), model, None)
    model, processor = checkpoints.load(name, device, dtype)
    return Subject(name, identity(name), model, processor)


def dtype_of(subject: Subject) -> str:
    """The dtype that its parameters have."""
    return str(next(subject.model.parameters()).dtype).removeprefix("torch.")
