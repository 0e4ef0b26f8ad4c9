"""Multi-turn dialogues about images and videos as JSON Lines; checked when they are read.

docs/dialogues.md describes every field.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

SCORINGS = ("exact", "positions", "checklist", "reference", "rating", "none")
"""How an answer is scored; all but the first two and the last ask a judge."""
JUDGED = ("checklist", "reference", "rating")

Video = str | tuple[str, ...]
"""A file, or the pictures of a video in order."""


@dataclass(frozen=True)
class Check:
    """One yes-or-no question that a judge answers about an answer.

    Attributes:
        question: Its text.
        answer: What a good answer makes the judge say, `"Yes"` or `"No"`.
        category: What it looks at; None where nobody said.
    """

    question: str
    answer: str = "Yes"
    category: str | None = None


@dataclass(frozen=True)
class Turn:
    """One question, with what is shown along with it.

    Attributes:
        question: Its text.
        images: Paths of pictures, relative to the data file's folder.
        videos: Likewise; each one is a file or a sequence of pictures.
        reference: A right answer; None where nobody gave one.
        scoring: One of `SCORINGS`.
        checklist: For a judge.
        category: The turn's own.
        max_new_tokens: Most tokens to generate, the end token included; None takes the run's.
    """

    question: str
    images: tuple[str, ...] = ()
    videos: tuple[Video, ...] = ()
    reference: str | None = None
    scoring: str = "none"
    checklist: tuple[Check, ...] = ()
    category: str | None = None
    max_new_tokens: int | None = None

    def paths(self) -> list[str]:
        """Every file that the turn shows."""
        frames = [[video] if isinstance(video, str) else list(video) for video in self.videos]
        return [*self.images, *(path for video in frames for path in video)]


@dataclass(frozen=True)
class Dialogue:
    """One conversation.

    Attributes:
        id: Unique in its file.
        turns: At least one.
        system: A system message.
        context: What only a judge is told, such as a caption of the picture.
        category: The dialogue's own.
        seed: For selectors that draw; None leaves it to the run.
    """

    id: str
    turns: tuple[Turn, ...]
    system: str | None = None
    context: str | None = None
    category: str | None = None
    seed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; what has its default is left out."""
        turns = [{**_told(turn), "scoring": turn.scoring} for turn in self.turns]
        for plain, turn in zip(turns, self.turns, strict=True):
            if turn.checklist:
                plain["checklist"] = [_told(check) for check in turn.checklist]
        return {**_told(self), "turns": turns}

    @cached_property
    def digest(self) -> str:
        """12 hex digits that change with anything in the dialogue but the files it names."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _told(record: Any) -> dict[str, Any]:
    """The fields of a dataclass that were given."""
    fields = record.__dataclass_fields__.items()
    given = {name: getattr(record, name) for name, field in fields}
    return {
        name: value
        for name, value in given.items()
        if value != record.__dataclass_fields__[name].default
    }


def write_dialogues(path: Path, dialogues: Iterable[Dialogue]) -> int:
    """Write a new data file.

    Args:
        path: Where; the file must not be there yet.
        dialogues: In order.

    Returns:
        How many.

    Raises:
        ValueError: The file is there, or no dialogue was given.
    """
    refuse_existing(path)
    lines = [json.dumps(dialogue.to_dict(), ensure_ascii=False) for dialogue in dialogues]
    if not lines:
        raise ValueError(f"no dialogue to write to {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in lines)
    return len(lines)


def refuse_existing(path: Path) -> None:
    """Nothing is overwritten.

    Raises:
        ValueError: The file is there.
    """
    if path.exists():
        raise ValueError(f"{path} is there already; name another file, or remove it first")


def read_dialogues(path: Path) -> list[Dialogue]:
    """Read and check a data file, and that the files it names are there.

    Raises:
        ValueError: Says file, line and field, what stands there and what is allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    dialogues: dict[str, Dialogue] = {}
    # Not splitlines(): JSON strings may hold U+2028 and the like as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        fault = _Fault(f"{path}:{number}", path.parent)
        dialogue = _dialogue(_parsed(line, fault), fault)
        if dialogue.id in dialogues:
            fault.at("id").say(f"{dialogue.id!r} stands on an earlier line, too")
        dialogues[dialogue.id] = dialogue
    if not dialogues:
        raise ValueError(f"{path} holds no dialogue")
    return list(dialogues.values())


@dataclass(frozen=True)
class _Fault:
    """Where in a file something is, to be told if it is wrong; its folder has the media."""

    place: str
    folder: Path
    field: str = ""

    def at(self, name: str) -> _Fault:
        joint = "." if self.field and not name.startswith("[") else ""
        return replace(self, field=f"{self.field}{joint}{name}")

    def say(self, what: str) -> NoReturn:
        raise ValueError(f"{self.place}: {self.field + ': ' if self.field else ''}{what}")


def _parsed(line: str, fault: _Fault) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        fault.say(f"not a line of JSON: {error}")


def _dialogue(plain: Any, fault: _Fault) -> Dialogue:
    _object(plain, Dialogue, fault, needed=("id", "turns"))
    values = {**plain, "turns": _list(plain["turns"], fault.at("turns"), _turn)}
    if not values["turns"]:
        fault.at("turns").say("a dialogue has at least one turn")
    for name in ("id", "system", "context", "category"):
        _text(values.get(name), fault.at(name), optional=name != "id")
    _whole(values.get("seed"), fault.at("seed"), 0)
    return Dialogue(**values)


def _turn(plain: Any, fault: _Fault) -> Turn:
    _object(plain, Turn, fault, needed=("question",))
    values = dict(plain)
    _text(values["question"], fault.at("question"))
    for name in ("reference", "category"):
        _text(values.get(name), fault.at(name), optional=True)
    _whole(values.get("max_new_tokens"), fault.at("max_new_tokens"), 1)
    values["images"] = _list(values.get("images", []), fault.at("images"), _path)
    values["videos"] = _list(values.get("videos", []), fault.at("videos"), _video)
    if len({isinstance(video, str) for video in values["videos"]}) > 1:
        fault.at("videos").say("videos of one turn are all files or all lists of pictures")
    values["checklist"] = _list(values.get("checklist", []), fault.at("checklist"), _check)
    values["scoring"] = _scoring(values, fault.at("scoring"))
    return Turn(**values)


def _scoring(values: Mapping[str, Any], fault: _Fault) -> str:
    """The way of scoring: as told, else the one that what is there allows."""
    reference = values.get("reference")
    fallback = "checklist" if values["checklist"] else "reference" if reference else "none"
    scoring = values.get("scoring", fallback)
    if scoring not in SCORINGS:
        fault.say(f"{scoring!r} is unknown; use one of {', '.join(SCORINGS)}")
    if scoring in ("exact", "positions", "reference") and reference is None:
        fault.say(f"{scoring!r} needs a reference in the same turn")
    if scoring == "checklist" and not values["checklist"]:
        fault.say("'checklist' needs a checklist in the same turn")
    return scoring


def _check(plain: Any, fault: _Fault) -> Check:
    _object(plain, Check, fault, needed=("question",))
    _text(plain["question"], fault.at("question"))
    _text(plain.get("category"), fault.at("category"), optional=True)
    if plain.get("answer", "Yes") not in ("Yes", "No"):
        fault.at("answer").say(f"must be Yes or No; got {plain['answer']!r}")
    return Check(**plain)


def _video(plain: Any, fault: _Fault) -> Video:
    if not isinstance(plain, list):
        return _path(plain, fault)
    pictures = _list(plain, fault, _path)
    if len(pictures) < 2:
        fault.say(f"a list of pictures needs at least two; got {len(pictures)}")
    return pictures


def _path(plain: Any, fault: _Fault) -> str:
    _text(plain, fault)
    if Path(plain).is_absolute() or "\\" in plain or "://" in plain:
        fault.say(f"a path relative to the data file, with forward slashes; got {plain!r}")
    if not (fault.folder / plain).is_file():
        fault.say(f"no such file: {fault.folder / plain}")
    return plain


def _list(plain: Any, fault: _Fault, item: Callable[[Any, _Fault], Any]) -> tuple[Any, ...]:
    if not isinstance(plain, list):
        fault.say(f"must be a list; got {plain!r}")
    return tuple(item(one, fault.at(f"[{at}]")) for at, one in enumerate(plain))


def _object(plain: Any, kind: Any, fault: _Fault, needed: tuple[str, ...]) -> None:
    if not isinstance(plain, dict):
        fault.say(f"must be an object; got {plain!r}")
    known = kind.__dataclass_fields__
    if unknown := sorted(set(plain) - set(known)):
        fault.at(unknown[0]).say(f"an unknown field; known are {', '.join(known)}")
    for name in needed:
        if name not in plain:
            fault.at(name).say("is missing")


def _text(plain: Any, fault: _Fault, optional: bool = False) -> None:
    if plain is None and optional:
        return
    if not isinstance(plain, str) or not plain.strip():
        fault.say(f"must be a text that is not empty; got {plain!r}")


def _whole(plain: Any, fault: _Fault, low: int) -> None:
    if plain is None:
        return
    if isinstance(plain, bool) or not isinstance(plain, int) or plain < low:
        fault.say(f"must be a whole number, {low} or more; got {plain!r}")
