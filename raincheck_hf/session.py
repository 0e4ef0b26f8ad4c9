"""Multi-turn conversations: text in, text out; the cache and the token ids are kept here."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer
from transformers.image_utils import load_image
from transformers.utils import is_torchcodec_available
from transformers.video_utils import load_video

from raincheck_hf.cache import RaincheckCache
from raincheck_hf.config import RaincheckConfig
from raincheck_hf.generation import enable_raincheck
from raincheck_hf.report import RaincheckReport

# Stands for an earlier answer while the template shows how it joins a new message to one.
_ANSWER = "\N{OBJECT REPLACEMENT CHARACTER}answer\N{OBJECT REPLACEMENT CHARACTER}"


class RaincheckSession:
    """One conversation with one model.

    It appends token ids and never renders history again, so that what the model said is continued
    exactly. Use it from one thread at a time; many sessions may share one model.

    Attributes:
        model: The model, enabled.
        processor: Its processor.
        config: The session's config; may be replaced between turns.
        cache: The conversation's RaincheckCache.
        history: The messages so far, in chat form: ``{"role", "content"}``.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        config: RaincheckConfig | None = None,
        system: str | None = None,
    ) -> None:
        """Start a conversation.

        Args:
            model: A supported model; it is enabled where it is not yet.
            processor: The model's processor, with a chat template.
            config: How turns run; None takes the model's default.
            system: A system message.

        Raises:
            ValueError: The architecture is not supported.
            TypeError: The processor has no tokenizer, or ``config`` is not a RaincheckConfig.
        """
        if not hasattr(processor, "tokenizer"):
            raise TypeError(
                f"RaincheckSession needs the model's processor (AutoProcessor), which holds its "
                f"tokenizer; got {type(processor).__name__}"
            )
        if config is not None and not isinstance(config, RaincheckConfig):
            raise TypeError(f"config must be a RaincheckConfig; got {type(config).__name__}")
        self.model = enable_raincheck(model)
        self.processor = processor
        self.config = config
        self._system = system
        self._begin()

    @property
    def report(self) -> RaincheckReport | None:
        """The last turn's report."""
        return self.cache.report

    def ask(
        self,
        text: str,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        **generate_kwargs: Any,
    ) -> str:
        """One turn.

        Args:
            text: The question.
            images: Pictures for it: PIL images, arrays [h, w, 3], paths or URLs.
            videos: Videos for it: lists of pictures, arrays [frames, h, w, 3], paths or URLs.
            **generate_kwargs: As for ``generate``.

        Returns:
            The answer.

        Raises:
            ValueError: Bad input, or the session is closed.
            Exception: What stopped the answer. In every case the conversation is as before.
        """
        message = _message(text, images, videos)
        answer = self._answer(self._inputs(message), generate_kwargs)
        self.history += [message, {"role": "assistant", "content": answer}]
        return answer

    def stream(
        self,
        text: str,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        **generate_kwargs: Any,
    ) -> Generator[str, None, None]:
        """As ``ask``, in pieces that join to the whole.

        A reader that stops early (``close()`` of the iterator, or leaving its loop) ends the answer
        after the token under way; what was said so far is part of the conversation.
        """
        # Checked here, not when the first piece is read.
        message = _message(text, images, videos)
        return self._pieces(message, self._inputs(message), generate_kwargs)

    def _pieces(
        self, message: dict[str, Any], inputs: dict[str, Any], generate_kwargs: dict[str, Any]
    ) -> Generator[str, None, None]:
        streamer = TextIteratorStreamer(
            self.processor.tokenizer, skip_prompt=True, skip_special_tokens=True
        )
        reader_left = _ReaderLeft()
        criteria = StoppingCriteriaList(generate_kwargs.pop("stopping_criteria", None) or ())
        criteria.append(reader_left)
        outcome: list[Any] = []

        def run() -> None:
            try:
                kwargs = {**generate_kwargs, "stopping_criteria": criteria, "streamer": streamer}
                outcome.append(self._answer(inputs, kwargs))
            except BaseException as error:  # raised again in the reader's thread
                outcome.append(error)
                streamer.end()  # else the reader waits for ever

        worker = threading.Thread(target=run, name="raincheck-stream", daemon=True)
        worker.start()
        try:
            yield from (piece for piece in streamer if piece)
        finally:
            reader_left.happened = True
            worker.join()
            if isinstance(outcome[0], str):
                self.history += [message, {"role": "assistant", "content": outcome[0]}]
        if isinstance(outcome[0], BaseException):
            raise outcome[0]

    def finish(self, timeout: float | None = None) -> None:
        """Wait until nothing is pending; see ``RaincheckCache.finish``."""
        self.cache.finish(timeout)

    def reset(self) -> None:
        """Start over with an empty conversation."""
        told = self.cache.on_progress
        self.cache.close()
        self._begin()
        self.cache.on_progress = told

    def close(self) -> None:
        """Free the conversation's memory."""
        self.cache.close()

    def fork(self) -> RaincheckSession:
        """An independent session that starts where this one is."""
        twin = RaincheckSession(self.model, self.processor, self.config, self._system)
        twin.cache = self.cache.fork()
        twin.history = list(self.history)
        return twin

    def _begin(self) -> None:
        self.cache = RaincheckCache(self.model)
        self.history: list[dict[str, Any]] = []
        if self._system is not None:
            self.history.append({"role": "system", "content": self._system})

    def _answer(self, inputs: dict[str, Any], generate_kwargs: dict[str, Any]) -> str:
        taken = sorted({"cache", "past_key_values", "input_ids", "inputs"} & set(generate_kwargs))
        if taken:
            raise ValueError(f"a session brings its own {', '.join(taken)}; leave it out")
        if generate_kwargs.get("stop_strings"):
            generate_kwargs = {"tokenizer": self.processor.tokenizer, **generate_kwargs}
        call = {
            **inputs,
            "raincheck": True if self.config is None else self.config,
            "cache": self.cache,
            **generate_kwargs,
            "return_dict_in_generate": True,
        }
        try:
            out = self.model.generate(**call)
        except BaseException:
            if not self.cache.closed:
                self.cache.rewind()  # a turn that broke off is no part of the history either
            raise
        new = out.sequences[0, inputs["input_ids"].shape[1] :]
        return self.processor.tokenizer.decode(new, skip_special_tokens=True)

    def _inputs(self, message: dict[str, Any]) -> dict[str, Any]:
        """Model inputs: the ids of the whole conversation, and the new pictures and videos."""
        if self.cache.closed:
            raise ValueError("this session is closed; reset() starts over with an empty one")
        media = {
            kind: [part[kind] for part in message["content"] if part["type"] == kind]
            for kind in ("image", "video")
        }
        inputs = self.processor(
            text=[self._markup(message)],
            images=media["image"] or None,
            **_videos(media["video"]),
            return_tensors="pt",
        ).to(self.model.device)
        ids = inputs["input_ids"]
        # The last generated token was not consumed in its own turn. An answer that ran to its end
        # has the end token there, with which the markup starts; one that was cut has not.
        last = self.cache.last_token
        if last is not None and int(ids[0, 0]) != last:
            ids = torch.cat([ids.new_tensor([[last]]), ids], dim=1)
        ids = torch.cat([self.cache.token_ids[None].to(ids.device), ids], dim=1)
        kept = {
            key: value
            for key, value in inputs.items()
            if key not in ("input_ids", "attention_mask", "mm_token_type_ids")
        }
        return {**kept, "input_ids": ids}

    def _markup(self, message: dict[str, Any]) -> str:
        """The chat markup of what comes after the conversation so far."""

        def render(messages: list[dict[str, Any]]) -> str:
            return self.processor.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )

        if self.cache.get_seq_length() == 0:
            return render([*self.history, message])
        earlier = [_message("?"), {"role": "assistant", "content": _text(_ANSWER)}]
        rendered = render([*earlier, message])
        return rendered[rendered.index(_ANSWER) + len(_ANSWER) :]


class _ReaderLeft(StoppingCriteria):
    """Ends generation when nobody reads the stream any more."""

    def __init__(self) -> None:
        self.happened = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.happened, device=input_ids.device)


def _text(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _message(text: str, images: Sequence[Any] = (), videos: Sequence[Any] = ()) -> dict[str, Any]:
    """A user message; pictures first, loaded.

    Raises:
        TypeError: The text is not a string.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a string; got {type(text).__name__}")
    content: list[dict[str, Any]] = [
        {"type": "image", "image": _image(image)} for image in _sequence("images", images)
    ]
    content += [{"type": "video", "video": _video(video)} for video in _sequence("videos", videos)]
    return {"role": "user", "content": [*content, *_text(text)]}


def _videos(videos: Sequence[Any]) -> dict[str, Any]:
    """The processor's arguments for videos: files go by their frame rate, pictures as they are.

    Raises:
        ValueError: Both kinds in one question.
    """
    files = [video for video in videos if isinstance(video, str)]
    if not videos:
        return {}
    if not files:
        return {"videos": list(videos), "do_sample_frames": False}
    if len(files) < len(videos):
        raise ValueError("videos of one question must be all files or all lists of pictures")
    backend = "torchcodec" if is_torchcodec_available() else "pyav"
    loaded = [load_video(file, backend=backend) for file in files]  # type: ignore[arg-type]
    frames, metadata = zip(*loaded, strict=True)
    return {"videos": list(frames), "video_metadata": list(metadata)}


def _image(image: Any) -> Any:
    if isinstance(image, np.ndarray):
        return Image.fromarray(image)
    return load_image(_existing(image))


def _video(video: Any) -> Any:
    video = _existing(video)
    if not isinstance(video, str) and (not hasattr(video, "__len__") or len(video) < 2):
        raise ValueError("a video needs at least two pictures, in a list or an array")
    return video


def _existing(source: Any) -> Any:
    """A path as a string; anything else as it is.

    Raises:
        ValueError: A path without a file.
    """
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    local = isinstance(source, str) and not re.match(r"https?://|data:", source)
    if local and not os.path.isfile(source):
        raise ValueError(f"no such file: {source!r}")
    return source


def _sequence(name: str, items: Any) -> Sequence[Any]:
    if items is None:
        return ()
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise TypeError(f"{name} must be a list; got {type(items).__name__}")
    return items
