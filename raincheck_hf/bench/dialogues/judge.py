"""What a judge is asked about an answer, and what its reply is worth."""

from __future__ import annotations

import base64
import hashlib
import json
import mimetypes
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from raincheck_hf.bench.dialogues.endpoint import Endpoint
from raincheck_hf.bench.dialogues.format import JUDGED
from raincheck_hf.bench.rows import Row

_NONE = "(none)"
_FIELDS = ("context", "history", "question", "reference", "answer", "checklist", "count")


class BadVerdict(ValueError):
    """The judge replied, and not what it was asked for."""


class Prompts:
    """The prompts, one file a kind of scoring: `checklist.md`, `reference.md`, `rating.md`.

    Args:
        folder: Where they are; None for the package's own.

    Raises:
        ValueError: One is missing, or has a placeholder that is unknown.
    """

    def __init__(self, folder: Path | None = None) -> None:
        place: Any = folder or files(__package__).joinpath("prompts")
        self._templates: dict[str, Template] = {}
        for scoring in JUDGED:
            try:
                text = place.joinpath(f"{scoring}.md").read_text(encoding="utf-8")
            except OSError as error:
                raise ValueError(f"no prompt {scoring}.md in {folder}: {error}") from error
            template = Template(text)
            unknown = sorted(set(template.get_identifiers()) - set(_FIELDS))
            if unknown or not template.is_valid():
                raise ValueError(
                    f"{scoring}.md in {folder}: ${', $'.join(unknown) or '…'} is no placeholder; "
                    f"known are ${', $'.join(_FIELDS)}, and a dollar sign is written $$"
                )
            self._templates[scoring] = template

    def digest(self, scoring: str) -> str:
        """12 hex digits that tell one wording from another."""
        return hashlib.sha256(self._templates[scoring].template.encode()).hexdigest()[:12]

    def render(self, talk: Sequence[Row]) -> str:
        """The prompt about the last answer of a conversation.

        Args:
            talk: Its rows in order, up to the one in question.
        """
        row = talk[-1]
        said = [f"User: {turn['question']}\nAssistant: {turn['said']}" for turn in talk[:-1]]
        checks = [
            f"{number}. {check['question']}" for number, check in enumerate(row["checklist"], 1)
        ]
        return self._templates[row["scoring"]].substitute(
            context=row["context"] or _NONE,
            history="\n".join(said) or _NONE,
            question=row["question"],
            reference=row["reference"] or _NONE,
            answer=row["said"] or "(an empty answer)",
            checklist="\n".join(checks) or _NONE,
            count=len(checks),
        )


@dataclass(frozen=True)
class Judge:
    """Scores answers.

    Attributes:
        endpoint: Who is asked.
        prompts: What is asked.
        media: The folder from which rows name their pictures, to show them; None for text alone.
    """

    endpoint: Endpoint
    prompts: Prompts
    media: Path | None = None

    def about(self, row: Row) -> dict[str, Any]:
        """Who judges and how: the fields that tell one verdict on an answer from another."""
        return {
            "judge": self.endpoint.model,
            "prompt": self.prompts.digest(row["scoring"]),
            "shown": self.media is not None,
        }

    def score(self, talk: Sequence[Row]) -> dict[str, Any]:
        """Score the last answer of a conversation.

        Args:
            talk: Its rows in order, up to the one in question.

        Returns:
            `score`, 0 to 1, and `reply`, the judge's words.

        Raises:
            BadVerdict: Every reply was unusable.
            EndpointError: There was none.
            ValueError: A picture is missing.
        """
        content: Any = self.prompts.render(talk)
        paths = [path for row in talk for path in row["images"]]
        if self.media is not None and paths:
            pictures = [_picture(self.media / path) for path in paths]
            content = [{"type": "text", "text": content}, *pictures]
        attempt = 0
        while True:
            reply = self.endpoint.reply(content)
            try:
                return {"score": verdict(talk[-1], reply), "reply": reply}
            except BadVerdict:
                if attempt == self.endpoint.retries:
                    raise
                attempt += 1


def verdict(row: Row, reply: str) -> float:
    """What a reply says about an answer, 0 to 1.

    A checklist counts the entries that are answered as a good answer would make them.

    Args:
        row: The answer, with its `scoring` and `checklist`.
        reply: The judge's words; its last JSON object counts, whatever stands around it.

    Raises:
        BadVerdict: It is not what the prompt asks for.
    """
    wanted = "answers" if row["scoring"] == "checklist" else "score"
    found = [one for one in _objects(reply) if wanted in one]
    if not found:
        raise BadVerdict(f"no JSON object with {wanted!r} in {reply[:200]!r}")
    value = found[-1][wanted]
    if wanted == "score":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 10:
            raise BadVerdict(f"a score is a number from 0 to 10; got {value!r}")
        return value / 10
    expected = [check["answer"].casefold() for check in row["checklist"]]
    given = [str(one).strip().casefold() for one in value] if isinstance(value, list) else []
    if len(given) != len(expected) or not set(given) <= {"yes", "no"}:
        raise BadVerdict(f"answers are {len(expected)} times Yes or No; got {value!r}")
    return sum(one == other for one, other in zip(given, expected, strict=True)) / len(expected)


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects in a text, outermost ones, in order."""
    decoder = json.JSONDecoder()
    found = []
    at = text.find("{")
    while at >= 0:
        try:
            one, end = decoder.raw_decode(text, at)
            found.append(one)
        except ValueError:
            end = at + 1
        at = text.find("{", end)
    return found


def _picture(path: Path) -> dict[str, Any]:
    try:
        data = base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise ValueError(f"a picture of the dialogues cannot be read: {error}") from error
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
