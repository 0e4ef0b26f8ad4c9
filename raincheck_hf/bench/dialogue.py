"""A conversation through `generate`, turn by turn on one cache, answers as the model gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from raincheck_hf.bench.ways import circumstances, config_of
from raincheck_hf.config import RaincheckConfig
from raincheck_hf.report import RaincheckReport

_ANSWER = "An answer that no template holds."


@dataclass(frozen=True)
class Asked:
    """One question to be asked.

    Attributes:
        question: Its text.
        truth: The right answer.
        budget: Most tokens the model may generate, its end token included.
    """

    question: str
    truth: str
    budget: int


@dataclass(frozen=True)
class Answered:
    """What came back.

    Attributes:
        said: The answer's text, special tokens left out.
        report: The turn's report.
        tokens: How many tokens were generated, an end token included.
    """

    said: str
    report: RaincheckReport
    tokens: int


class Script:
    """The rendered form of one conversation, made once and run in several ways.

    Args:
        processor: The model's processor.
        image: The picture shown with the first question.
        asked: The questions, one a turn.
        device: Where inputs go.
    """

    def __init__(
        self,
        processor: Any,
        image: Image.Image,
        asked: Sequence[Asked],
        device: torch.device | str = "cpu",
    ) -> None:
        first = [{"type": "image"}, {"type": "text", "text": asked[0].question}]
        text = _render(processor, [{"role": "user", "content": first}])
        inputs = processor(text=[text], images=[image], return_tensors="pt").to(device)
        self.asked = tuple(asked)
        self._tokenizer = processor.tokenizer
        self._opening: dict[str, Tensor] = dict(inputs)
        self._follow_ups = [_follow_up(processor, ask.question).to(device) for ask in asked[1:]]

    @property
    def prompt(self) -> Tensor:
        """int64 [1, L], the first turn's ids."""
        return self._opening["input_ids"]

    def run(self, model: Any, way: str, base: RaincheckConfig) -> list[Answered]:
        """Hold the conversation, greedily; each turn follows on the model's own answers.

        Args:
            model: An enabled model.
            way: A key of `ways.WAYS`.
            base: What raincheck itself runs with; the way changes it.
        """
        config = config_of(way, base)
        answers: list[Answered] = []
        inputs = self._opening
        with circumstances(way):
            for turn, ask in enumerate(self.asked):
                out = model.generate(
                    **inputs,
                    raincheck=config,
                    do_sample=False,
                    max_new_tokens=ask.budget,
                    return_dict_in_generate=True,
                )
                new = out.sequences[0, inputs["input_ids"].shape[1] :]
                said = self._tokenizer.decode(new, skip_special_tokens=True)
                answers.append(Answered(said, out.raincheck, len(new)))
                if turn + 1 < len(self.asked):
                    ids = _joined(out.sequences, self._follow_ups[turn])
                    inputs = {"input_ids": ids, "cache": out.cache}
            out.cache.close()
        return answers


def _render(processor: Any, messages: list[dict[str, Any]]) -> str:
    return processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _follow_up(processor: Any, question: str) -> Tensor:
    """What the template puts behind an answer up to the next one, int64 [1, L].

    Rendered behind a placeholder and cut there, so that history is never rendered again.
    """
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": _ANSWER}]},
        {"role": "user", "content": [{"type": "text", "text": question}]},
    ]
    text = _render(processor, messages).rpartition(_ANSWER)[2]
    return processor.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids


def _joined(said: Tensor, follow_up: Tensor) -> Tensor:
    """Ids so far and the next question; an answer that ran to its end holds the end token."""
    ended = int(said[0, -1]) == int(follow_up[0, 0])
    return torch.cat([said, follow_up[:, 1:] if ended else follow_up], dim=1)
