"""VLMEvalKit on one cache a dialogue: a model class, a local file of dialogues, and a runner.

`python -m raincheck_hf.harness.vlmeval --model-args pretrained=...,retention=0.3 --data NAME ...`
registers the model and hands everything else to VLMEvalKit's own runner.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import vlmeval.run
from vlmeval.config import supported_VLM
from vlmeval.dataset import DATASET_CLASSES
from vlmeval.dataset.image_mt import ImageMTDataset
from vlmeval.smp import load as load_table
from vlmeval.smp import toliststr
from vlmeval.vlm.base import BaseModel
from vlmeval.vlm.qwen3_vl.prompt import Qwen3VLPromptMixin

from raincheck_hf.harness.dialogue import Answer, Dialogue
from raincheck_hf.harness.loading import load
from raincheck_hf.harness.options import FIELDS, config_of, without_next_turn

NAME = "raincheck_qwen"

_log = logging.getLogger(__name__)
_SIZES = (
    "min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width",
    "fps", "nframes", "sample_fps",
)  # fmt: skip

Utterance = dict[str, Any]


class RaincheckVLM(Qwen3VLPromptMixin, BaseModel):
    """A Qwen vision-language model that answers with `raincheck=`.

    Prompts of multiple-choice, yes-or-no and short-answer datasets are those of VLMEvalKit's own
    Qwen3-VL.
    """

    INSTALL_REQ = False
    INTERLEAVE = True
    VIDEO_LLM = True

    def __init__(
        self,
        pretrained: str,
        mode: str = "raincheck",
        device: str = "cuda",
        device_map: str | None = None,
        dtype: str = "auto",
        attn_implementation: str | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        total_pixels: int | None = None,
        fps: float | None = 2,
        nframes: int | None = None,
        max_new_tokens: int = 2048,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        system_prompt: str | None = None,
        use_custom_prompt: bool = True,
        figures: str | Path | None = None,
        **fields: Any,
    ) -> None:
        """Load the checkpoint.

        Args:
            pretrained: `"qwen3_vl"` or `"qwen3_5"` for the small models, a folder, or a hub name.
            mode: `"full"`, `"hard"` or `"raincheck"`.
            device: Where the model goes.
            device_map: As in `from_pretrained`.
            dtype: A torch dtype's name, or `"auto"` for the checkpoint's own.
            attn_implementation: `"sdpa"` or `"eager"`.
            min_pixels: Least size of pictures and frames; None leaves it to qwen-vl-utils.
            max_pixels: Largest, likewise.
            total_pixels: Of all frames of a video together, likewise.
            fps: Frames a second to take of a video, unless `nframes` is given.
            nframes: Frames to take of a video.
            max_new_tokens: Most tokens of an answer.
            temperature: 0 takes the likeliest token each time.
            top_p: For sampling.
            top_k: For sampling.
            system_prompt: A system message.
            use_custom_prompt: Whether datasets get the prompts of Qwen3-VL.
            figures: A file that gets a row of JSON for each answer; added to if it exists.
            **fields: Fields of `RaincheckConfig`.

        Raises:
            ValueError: An unknown argument, a value out of range, or an architecture that is not
                supported.
        """
        super().__init__(use_custom_prompt=use_custom_prompt)
        # VLMEvalKit passes its own switches to models whose name it takes for Qwen2-VL's.
        fields.pop("use_vllm", None)
        if unknown := sorted(set(fields) - set(FIELDS)):
            raise ValueError(
                f"{NAME} does not know {', '.join(unknown)}; beside its own arguments it takes "
                f"the fields of RaincheckConfig: {', '.join(FIELDS)}"
            )
        self.config = config_of(fields, mode)
        self.model, self.processor = load(
            pretrained, dtype, device, device_map, attn_implementation
        )
        pixels = {"min_pixels": min_pixels, "max_pixels": max_pixels, "total_pixels": total_pixels}
        frames = {"fps": fps} if nframes is None else {"nframes": nframes}
        self._media: dict[str, dict[str, Any]] = {"image": pixels, "video": {**pixels, **frames}}
        sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
        self._generate: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}
        if temperature > 0:
            self._generate |= {"do_sample": True, **_given(sampling)}
        self._system = [] if system_prompt is None else [_message("system", _text(system_prompt))]
        self._figures = None if figures is None else Path(figures)
        self._dialogue: Dialogue | None = None
        self._said: list[Utterance] = []
        self._dialogues = 0

    def generate_inner(self, message: list[Utterance], dataset: str | None = None) -> str:
        """One answer to one message."""
        dialogue = self._start(more_follows=False)
        asked = _message("user", self._content(message))
        answer = dialogue.ask([*self._system, asked], **self._generate)
        self._note(answer, message, dataset, turn=1)
        return answer.text

    def chat_inner(self, messages: list[Utterance], dataset: str | None = None) -> str:
        """The next answer of a dialogue.

        VLMEvalKit hands over the whole dialogue each time. One that goes on from the last call
        goes on on its cache; any other begins anew.
        """
        try:
            return self._next(messages, dataset)
        except Exception:
            # VLMEvalKit tries again without the first turns, and says nothing of why.
            _log.exception("turn %d of a dialogue failed", len(messages) // 2 + 1)
            raise

    def _next(self, messages: list[Utterance], dataset: str | None) -> str:
        goes_on = self._dialogue is not None and self._said and messages[:-1] == self._said
        if goes_on and self._dialogue is not None:
            dialogue, new = self._dialogue, messages[-1:]
            asked = [_message(one["role"], self._content(one["content"])) for one in new]
        else:
            dialogue = self._start(more_follows=True)
            asked = [_message(one["role"], self._content(one["content"])) for one in messages]
            asked = [*self._system, *asked]
        answer = dialogue.ask(asked, **self._generate)
        reply = _message("assistant", [{"type": "text", "value": answer.text}])
        self._said = [*copy.deepcopy(messages), reply]
        self._note(answer, messages[-1]["content"], dataset, turn=len(self._said) // 2)
        return answer.text

    def _start(self, more_follows: bool) -> Dialogue:
        if self._dialogue is not None:
            self._dialogue.close()
        config = self.config if more_follows else without_next_turn(self.config)
        self._dialogue, self._said = Dialogue(self.model, self.processor, config), []
        self._dialogues += 1
        return self._dialogue

    def _content(self, items: list[Utterance]) -> list[dict[str, Any]]:
        """VLMEvalKit's items as qwen-vl-utils reads them."""
        content: list[dict[str, Any]] = []
        for item in items:
            kind, value = item["type"], item["value"]
            if kind == "text":
                content += _text(value)
            elif kind in self._media:
                own = {name: item.get(name) for name in _SIZES}
                sizes = {**_given(self._media[kind]), **_given(own)}
                if isinstance(value, list):  # frames, already chosen
                    sizes = {name: size for name, size in sizes.items() if name != "fps"}
                content.append({"type": kind, kind: value, **sizes})
            else:
                raise ValueError(f"{NAME} takes text, images and videos; got {kind!r}")
        return content

    def _note(self, answer: Answer, asked: list[Utterance], dataset: str | None, turn: int) -> None:
        if self._figures is None:
            return
        row = {
            "dataset": dataset,
            "dialogue": self._dialogues,
            "turn": turn,
            "question": "".join(item["value"] for item in asked if item["type"] == "text"),
            "media": [item["value"] for item in asked if item["type"] != "text"],
            "answer": answer.text,
            **answer.figures,
        }
        self._figures.parent.mkdir(parents=True, exist_ok=True)
        with self._figures.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


class LocalDialogues(ImageMTDataset):
    """Dialogues of a local table in VLMEvalKit's layout of MMDU, scored by exact match.

    Columns: `index`; `image_path` or `image` (base64), a list where there are several; `question`
    and `answer`, lists with an entry a turn; `<ImageHere>` in a question stands for a picture.
    """

    FILES: dict[str, Path] = {}
    """Tables by the name that VLMEvalKit knows them by."""

    @classmethod
    def add(cls, path: Path) -> str:
        """Make a table known.

        Returns:
            Its name, the file's without suffix.
        """
        cls.FILES[path.stem] = path
        if cls not in DATASET_CLASSES:
            DATASET_CLASSES.append(cls)
        return path.stem

    @classmethod
    def supported_datasets(cls) -> list[str]:
        """Names of the tables."""
        return list(cls.FILES)

    def load_data(self, dataset: str) -> Any:
        """The table, a pandas DataFrame."""
        return load_table(str(self.FILES[dataset]))

    def evaluate(self, eval_file: str, **judge_kwargs: Any) -> dict[str, float]:
        """Exact match of answers, blanks at their ends aside.

        Args:
            eval_file: What VLMEvalKit wrote: the table and a column `prediction`.
            **judge_kwargs: Not used: there is no judge.

        Returns:
            `Overall`, and by turn `turn 1`, `turn 2` and so on, in percent.
        """
        table = load_table(eval_file)
        by_turn: dict[int, list[bool]] = {}
        for truths, said in zip(table["answer"], table["prediction"], strict=True):
            pairs = zip(toliststr(truths), toliststr(said), strict=True)
            for turn, (truth, answer) in enumerate(pairs, 1):
                by_turn.setdefault(turn, []).append(truth.strip() == answer.strip())
        every = [right for rights in by_turn.values() for right in rights]
        turns = {f"turn {turn}": _percent(rights) for turn, rights in sorted(by_turn.items())}
        return {"Overall": _percent(every), **turns}


def main(argv: Sequence[str] | None = None) -> None:
    """Register the model, and run VLMEvalKit.

    Args:
        argv: Arguments without the program's name; None takes the process's own.
    """
    parser = argparse.ArgumentParser(
        prog="python -m raincheck_hf.harness.vlmeval",
        description="VLMEvalKit's runner with a raincheck model; it takes all further options.",
        allow_abbrev=False,
    )
    parser.add_argument("--model-args", required=True, metavar="NAME=VALUE,...",
        help="pretrained, mode, fields of RaincheckConfig, others of RaincheckVLM")  # fmt: skip
    parser.add_argument("--model", default=NAME, help=f"a name for the results [{NAME}]")
    parser.add_argument("--data", nargs="+", required=True,
        help="VLMEvalKit's datasets, or .tsv files of dialogues")  # fmt: skip
    parser.add_argument("--work-dir", type=Path, default=Path("outputs"), help="[outputs]")
    args, others = parser.parse_known_args(argv)
    try:
        arguments = _read_arguments(args.model_args)
        config_of({name: arguments[name] for name in FIELDS if name in arguments},
            arguments.get("mode", "raincheck"))  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    figures = args.work_dir / args.model / "figures.jsonl"
    supported_VLM[args.model] = partial(RaincheckVLM, **{"figures": figures, **arguments})
    data = [LocalDialogues.add(Path(one)) if one.endswith(".tsv") else one for one in args.data]
    own = ["--model", args.model, "--data", *data, "--work-dir", str(args.work_dir)]
    sys.argv = ["vlmeval", *own, *others]  # where VLMEvalKit's runner reads its options
    vlmeval.run.main()


def _read_arguments(text: str) -> dict[str, Any]:
    """`name=value,...`, values as JSON where they are JSON, else as they stand.

    Raises:
        ValueError: A part without `=`, or no `pretrained`.
    """
    arguments: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"--model-args takes NAME=VALUE,...; got {part!r}")
        try:
            arguments[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            arguments[name.strip()] = value
    if "pretrained" not in arguments:
        raise ValueError("--model-args must say pretrained=..., a folder or a name")
    return arguments


def _message(role: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": role, "content": content}


def _text(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _percent(rights: Sequence[bool]) -> float:
    return 100 * sum(rights) / len(rights)


if __name__ == "__main__":
    main()
