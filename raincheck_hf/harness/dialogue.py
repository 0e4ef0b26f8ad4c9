"""One conversation of a harness on one cache: chat messages in, answers and figures out.

Unlike `RaincheckSession`, it renders the whole conversation each time, since harnesses compare
models by the text that their chat templates make of it, and takes messages in which text, images
and videos alternate. Pictures are read once, and handed to the model once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwen_vl_utils import process_vision_info
from torch import Tensor

from raincheck_hf.cache import RaincheckCache
from raincheck_hf.config import RaincheckConfig
from raincheck_hf.harness.figures import Figures, figures_of
from raincheck_hf.report import RaincheckReport

Message = dict[str, Any]

_PIXELS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}


@dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes:
        text: Special tokens left out.
        report: The turn's report.
        figures: See `figures.figures_of`.
    """

    text: str
    report: RaincheckReport
    figures: Figures


class Dialogue:
    """A conversation with one model.

    Attributes:
        messages: All of it so far, answers included.
        cache: Its RaincheckCache.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        config: RaincheckConfig,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        """Start an empty one.

        Args:
            model: Enabled.
            processor: Its processor.
            config: How turns run.
            template: More arguments for the chat template, such as `enable_thinking`.
        """
        self.messages: list[Message] = []
        self.cache = RaincheckCache(model)
        self._model = model
        self._processor = processor
        self._config = config
        self._template = dict(template or {})
        self._media = _Media()

    def ask(self, messages: Sequence[Message], **generate_kwargs: Any) -> Answer:
        """Put the next messages, the last of them the user's, and have the answer.

        Args:
            messages: What is new: `{"role", "content"}`, with content a string or a list of
                `{"type": "text" | "image" | "video", ...}` as qwen-vl-utils reads it.
            **generate_kwargs: As for `generate`.

        Raises:
            ValueError: No message, or the last is not the user's; or as `generate` raises it. In
                every case the conversation is as before.
        """
        if not messages or messages[-1]["role"] != "user":
            raise ValueError("the last message of a turn must be the user's")
        patch = int(self._processor.image_processor.patch_size)
        media = self._media.joined(_read(messages, patch))
        conversation = [*self.messages, *messages]
        inputs = self._inputs(conversation, media)
        try:
            out = self._model.generate(
                **inputs,
                raincheck=self._config,
                cache=self.cache,
                **generate_kwargs,
                return_dict_in_generate=True,
            )
        except BaseException:
            self.cache.rewind()  # a turn that broke off is no part of the conversation
            raise
        length = inputs["input_ids"].shape[1]
        new = out.sequences[0, length:]
        text = self._processor.tokenizer.decode(
            new, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self._media = media
        self.messages = [*conversation, {"role": "assistant", "content": _text(text)}]
        return Answer(text, out.raincheck, figures_of(out.raincheck, length, len(new)))

    def close(self) -> None:
        """Free the conversation's memory."""
        self.cache.close()

    def _inputs(self, conversation: list[Message], media: _Media) -> dict[str, Tensor]:
        """Ids of the whole conversation, pixels of what is new in it."""
        text = self._processor.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True, **self._template
        )
        inputs = self._processor(
            text=[text],
            images=list(media.images) or None,
            videos=list(media.videos) or None,
            video_metadata=list(media.metadata) or None,
            do_resize=False,  # qwen-vl-utils did
            do_sample_frames=False,  # likewise
            return_tensors="pt",
        ).to(self._model.device)
        seen = {"image": len(self._media.images), "video": len(self._media.videos)}
        return _without_old_pixels(dict(inputs), seen)


@dataclass(frozen=True)
class _Media:
    """Pictures as the processor takes them, resized.

    Attributes:
        images: PIL images.
        videos: Tensors [frames, 3, h, w].
        metadata: Of each video: frame rate and which frames were taken.
    """

    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()
    metadata: tuple[Any, ...] = ()

    def joined(self, later: _Media) -> _Media:
        return _Media(
            self.images + later.images,
            self.videos + later.videos,
            self.metadata + later.metadata,
        )


def _read(messages: Sequence[Message], patch_size: int) -> _Media:
    images, videos = process_vision_info(
        list(messages), return_video_metadata=True, image_patch_size=patch_size
    )
    frames, metadata = zip(*videos, strict=True) if videos else ((), ())
    return _Media(tuple(images or ()), frames, metadata)


def _without_old_pixels(inputs: dict[str, Any], seen: Mapping[str, int]) -> dict[str, Any]:
    """Drop what the cache holds: comparing it with what is there would cost time to first token."""
    for kind, (pixels, grid) in _PIXELS.items():
        if grid not in inputs or not seen[kind]:
            continue
        old = int(inputs[grid][: seen[kind]].prod(dim=1).sum())
        inputs[pixels], inputs[grid] = inputs[pixels][old:], inputs[grid][seen[kind] :]
        if kind == "video" and "second_per_grid_ts" in inputs:
            inputs["second_per_grid_ts"] = inputs["second_per_grid_ts"][seen[kind] :]
        if not len(inputs[grid]):
            del inputs[pixels], inputs[grid]
            if kind == "video":
                inputs.pop("second_per_grid_ts", None)
    return inputs


def _text(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]
