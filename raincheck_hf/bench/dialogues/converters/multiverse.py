"""MultiVerse (arXiv 2510.16641) from the parquet files of its dataset.

Columns, from the dataset card of `passing2961/MultiVerse`: `index`, `image`, `character`,
`scenario`, `goal`, `conversation` (a sequence of `speaker`, `utterance`, `checklist`, the last one
a sequence of `question`, `main_criteria`, `sub_criteria`) and six columns of categories. A sequence
of records may be stored as one record of lists; both are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from raincheck_hf.bench.dialogues.converters.fields import optional_text, text_of
from raincheck_hf.bench.dialogues.converters.media import MissingMedia, Store
from raincheck_hf.bench.dialogues.format import Check, Dialogue, Turn


def read_multiverse(source: Path, store: Store) -> Iterator[Callable[[], Dialogue]]:
    """Dialogues from a folder with `data/*.parquet` or `*.parquet`, or from one such file.

    Args:
        source: The folder or the file.
        store: Where the pictures go, which the parquet files hold inside.

    Raises:
        ValueError: No such files, no reader for them, or another layout.
    """
    for path in _files(source):
        for number, record in enumerate(_records(path), 1):
            yield partial(_dialogue, record, f"{path}, row {number}", store)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    found = sorted(source.glob("data/*.parquet")) or sorted(source.glob("*.parquet"))
    if not found:
        raise ValueError(
            f"no *.parquet in {source} or {source / 'data'}; give the folder of the dataset "
            f"passing2961/MultiVerse as it is downloaded"
        )
    return found


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ValueError("MultiVerse comes as parquet files: pip install pyarrow") from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=8):
            yield from batch.to_pylist()
    except (OSError, ArrowException) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _dialogue(record: Mapping[str, Any], place: str, store: Store) -> Dialogue:
    index = text_of({"index": str(record.get("index") or "")}, "index", place)
    said = as_records(record.get("conversation"), f"{place}: 'conversation'")
    turns = list(_turns(said, place))
    image = record.get("image")
    data = image.get("bytes") if isinstance(image, Mapping) else None
    if not isinstance(data, bytes):
        raise MissingMedia(f"{place}: 'image' holds no picture")
    turns[0] = replace(turns[0], images=(store.encoded(f"multiverse-{index}", data),))
    told = {name: optional_text(record, name) for name in ("character", "scenario", "goal")}
    context = [f"The user's {name}: {text}" for name, text in told.items() if text]
    categories = [
        optional_text(record, name) for name in ("main_task_category", "sub_task_category")
    ]
    return Dialogue(
        id=f"multiverse-{index}",
        turns=tuple(turns),
        context="\n".join(context) or None,
        category=" / ".join(name for name in categories if name) or None,
    )


def _turns(said: list[Mapping[str, Any]], place: str) -> Iterator[Turn]:
    """Pairs of what the user says and what the assistant answers."""
    if not said or len(said) % 2:
        raise ValueError(f"{place}: {len(said)} utterances are not pairs of user and assistant")
    for number, (user, assistant) in enumerate(zip(said[::2], said[1::2], strict=True), 1):
        here = f"{place}: turn {number}"
        for one, wanted in ((user, "user"), (assistant, "assistant")):
            speaker = text_of(one, "speaker", here)
            if speaker.casefold() != wanted:
                raise ValueError(f"{here}: speaker must be {wanted}; got {speaker!r}")
        # The card does not say on which of the two the checklist stands.
        listed = [
            check
            for one in (assistant, user)
            for check in as_records(one.get("checklist"), f"{here}: 'checklist'")
        ]
        checks = tuple(_check(check, here) for check in listed)
        yield Turn(
            question=text_of(user, "utterance", here),
            reference=text_of(assistant, "utterance", here),
            scoring="checklist" if checks else "reference",
            checklist=checks,
        )


def _check(record: Mapping[str, Any], place: str) -> Check:
    names = [optional_text(record, name) for name in ("main_criteria", "sub_criteria")]
    return Check(
        question=text_of(record, "question", f"{place}: checklist"),
        category=" / ".join(name for name in names if name) or None,
    )


def as_records(value: Any, place: str) -> list[Mapping[str, Any]]:
    """A list of records, also from one record of lists.

    Raises:
        ValueError: It is neither, or the lists are not of one length.
    """
    if value is None:
        return []
    if isinstance(value, Mapping):
        lists = {name: column for name, column in value.items() if column is not None}
        if not all(isinstance(column, list) for column in lists.values()):
            raise ValueError(f"{place} must hold lists; got {value!r}")
        if len({len(column) for column in lists.values()}) > 1:
            raise ValueError(f"{place}: lists of one record are not of one length")
        return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    if isinstance(value, list) and all(isinstance(one, Mapping) for one in value):
        return value
    raise ValueError(f"{place} must be a list of records; got {value!r}")
