"""The model `raincheck_qwen` of lmms-eval.

Prompts and pictures are made as lmms-eval's own `qwen3_vl` makes them, so that with `mode=full` the
two answer alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from lmms_eval.api.instance import GenerationResult, Instance, TokenCounts
from lmms_eval.api.model import lmms
from lmms_eval.models.model_utils.gen_metrics import log_metrics
from lmms_eval.protocol import ChatMessages
from tqdm import tqdm

from raincheck_hf.harness.dialogue import Dialogue, Message
from raincheck_hf.harness.figures import Figures, figures_of_rounds, mean
from raincheck_hf.harness.loading import load
from raincheck_hf.harness.options import FIELDS, config_of, without_next_turn

_ROUNDS = ("conversation", "apart")
_END_OF_THINKING = "</think>"

T = TypeVar("T")


@dataclass
class RaincheckCounts(TokenCounts):
    """Figures beside token counts: the one thing besides the answer that a model can have logged.

    Attributes:
        figures: JSON-ready; what lmms-eval writes under `token_counts` of each sample.
    """

    figures: Figures = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Token counts and figures."""
        return {**super().to_dict(), **self.figures}


class Rounds(list[str]):
    """The answers of a conversation, one a round."""

    def strip(self) -> str:
        """Their text: lmms-eval's response cache asks any answer for it, to see if it is empty."""
        return "".join(self).strip()


class RaincheckQwen(lmms):
    """A Qwen vision-language model that answers with `raincheck=`."""

    is_simple = False

    def __init__(
        self,
        pretrained: str = "Qwen/Qwen3-VL-4B-Instruct",
        mode: str = "raincheck",
        device: str | None = None,
        device_map: str | None = None,
        dtype: str = "auto",
        attn_implementation: str | None = None,
        batch_size: int | str = 1,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        total_pixels: int | None = None,
        max_num_frames: int = 32,
        fps: float | None = None,
        system_prompt: str = "You are a helpful assistant.",
        enable_thinking: bool | None = None,
        rounds: str = "conversation",
        **fields: Any,
    ) -> None:
        """Load the checkpoint.

        Args:
            pretrained: `"qwen3_vl"` or `"qwen3_5"` for the small models, a folder, or a hub name.
            mode: `"full"`, `"hard"` or `"raincheck"`.
            device: Where the model goes; None takes the first GPU, or the CPU.
            device_map: As in `from_pretrained`.
            dtype: A torch dtype's name, or `"auto"` for the checkpoint's own.
            attn_implementation: `"sdpa"` or `"eager"`.
            batch_size: 1.
            min_pixels: Least size of pictures and frames; None leaves it to qwen-vl-utils.
            max_pixels: Largest, likewise.
            total_pixels: Of all frames of a video together, likewise.
            max_num_frames: Frames of a video; with `fps` or `total_pixels`, at most so many.
            fps: Frames a second to take of a video.
            system_prompt: A text or a file with it; empty for none.
            enable_thinking: For the chat template; with True, thinking is cut off the answer.
            rounds: `"conversation"` runs the rounds of a document as turns on one cache, `"apart"`
                each by itself, as lmms-eval's own models do.
            **fields: Fields of `RaincheckConfig`.

        Raises:
            ValueError: An unknown argument, a value out of range, or an architecture that is not
                supported.
        """
        super().__init__()
        if unknown := sorted(set(fields) - set(FIELDS) - {"max_batch_size"}):
            raise ValueError(
                f"raincheck_qwen does not know {', '.join(unknown)}; beside its own arguments it "
                f"takes the fields of RaincheckConfig: {', '.join(FIELDS)}"
            )
        fields.pop("max_batch_size", None)
        if str(batch_size) != "1":
            raise ValueError(
                f"raincheck runs one sequence at a time: batch_size=1; got {batch_size}"
            )
        if rounds not in _ROUNDS:
            raise ValueError(f"rounds must be one of {', '.join(_ROUNDS)}; got {rounds!r}")
        self.config = config_of(fields, mode)
        self.accelerator = Accelerator()
        self._rank = self.accelerator.process_index
        self._world_size = self.accelerator.num_processes
        if self._world_size > 1:
            device, device_map = str(self.accelerator.device), None
        elif device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model, self.processor = load(
            pretrained, dtype, device, device_map, attn_implementation
        )
        self.device = self._model.device
        self.system_prompt = self._resolve_system_prompt(system_prompt)
        self._template = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._cut_thinking = bool(enable_thinking)
        self._apart = rounds == "apart"
        self._pixels = _given(min_pixels=min_pixels, max_pixels=max_pixels)
        frames = "nframes" if fps is None and total_pixels is None else "max_frames"
        self._video = {
            **self._pixels,
            **_given(fps=fps, total_pixels=total_pixels),
            frames: max_num_frames,
        }

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Not offered: what raincheck is about begins with the first generated token."""
        raise NotImplementedError("raincheck_qwen generates; it gives no log-likelihoods")

    def generate_until(self, requests: list[Instance]) -> list[GenerationResult]:
        """One answer a document."""
        start, said, figures = time.perf_counter(), [], []
        for request in self._progress(requests, "Model Responding"):
            _, doc_to_messages, gen_kwargs, doc_id, task, split = request.args
            messages = self._messages(doc_to_messages(self.task_dict[task][split][doc_id]))
            dialogue = self._dialogue(more_follows=False)
            answer = dialogue.ask(self._opened(messages), **self._generate_kwargs(gen_kwargs))
            dialogue.close()
            said.append(self._said(answer.text))
            figures.append(answer.figures)
        return self._results(said, figures, time.perf_counter() - start)

    def generate_until_multi_round(self, requests: list[Instance]) -> list[GenerationResult]:
        """One answer a round, as a list for each document; the task says what a round asks."""
        start, said, figures = time.perf_counter(), [], []
        for request in self._progress(requests, "Multi-round Responding"):
            _, doc_to_messages, gen_kwargs, doc_id, task, split = request.args
            doc = self.task_dict[task][split][doc_id]
            rounds, of_rounds = self._hold(doc, doc_to_messages, self._generate_kwargs(gen_kwargs))
            said.append(rounds)
            figures.append(figures_of_rounds(of_rounds))
        return self._results(said, figures, time.perf_counter() - start)

    def _hold(
        self, doc: Any, doc_to_messages: Any, generate: dict[str, Any]
    ) -> tuple[Rounds, list[Figures]]:
        """All rounds of one document."""
        said, figures, info = Rounds(), [], None
        messages = doc_to_messages(doc)
        dialogue = self._dialogue(more_follows=not self._apart)
        while True:
            new = self._messages(messages)
            answer = dialogue.ask(new if dialogue.messages else self._opened(new), **generate)
            said.append(self._said(answer.text))
            figures.append(answer.figures)
            following = doc_to_messages(
                doc, round_idx=len(said), previous_output=list(said), previous_round_info=info
            )
            # A task that does not know rounds gives messages alone again.
            if not isinstance(following, tuple) or following[1]:
                break
            messages, _, _, info = following
            if self._apart:
                dialogue.close()
                dialogue = self._dialogue(more_follows=False)
        dialogue.close()
        return said, figures

    def _dialogue(self, more_follows: bool) -> Dialogue:
        config = self.config if more_follows else without_next_turn(self.config)
        return Dialogue(self._model, self.processor, config, self._template)

    def _messages(self, raw: Any) -> list[Message]:
        """A task's messages in the form of transformers."""
        return ChatMessages(messages=raw).to_hf_messages(self._video, self._pixels)

    def _opened(self, messages: list[Message]) -> list[Message]:
        if not self.system_prompt or messages[0]["role"] == "system":
            return messages
        content = [{"type": "text", "text": self.system_prompt}]
        return [{"role": "system", "content": content}, *messages]

    def _said(self, text: str) -> str:
        return text.partition(_END_OF_THINKING)[2].strip() if self._cut_thinking else text

    def _generate_kwargs(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A task's generation arguments as `generate` takes them."""
        tokenizer = self.processor.tokenizer
        sampled = float(asked.get("temperature") or 0) > 0
        names = ("temperature", "top_p", "top_k") if sampled else ()
        return {
            "max_new_tokens": asked.get("max_new_tokens", 128),
            "do_sample": sampled,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **_given(**{name: asked.get(name) for name in (*names, "num_beams")}),
        }

    def _progress(self, requests: list[Instance], what: str) -> Iterable[Instance]:
        return tqdm(requests, desc=what, disable=self.rank != 0)

    def _results(
        self, said: Sequence[Any], figures: list[Figures], seconds: float
    ) -> list[GenerationResult]:
        """Answers with their figures; sums go where lmms-eval's results file has `throughput`."""
        tokens = sum(one["output_tokens"] for one in figures)
        means = {
            name: mean([one[name] for one in figures], [1] * len(figures))
            for name in ("ttft_ms", "tpot_ms", "restored_fraction")
        }
        log_metrics(seconds, tokens, tokens / seconds, _given(**means))
        return [
            GenerationResult(
                text, RaincheckCounts(one["input_tokens"], one["output_tokens"], figures=one)
            )
            for text, one in zip(said, figures, strict=True)
        ]


def _given(**arguments: T | None) -> dict[str, T]:
    """Arguments that have a value."""
    return {name: value for name, value in arguments.items() if value is not None}
