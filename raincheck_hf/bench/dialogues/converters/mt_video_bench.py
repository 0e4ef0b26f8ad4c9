"""MT-Video-Bench (arXiv 2510.17722) from the folders that its evaluation code reads.

From `eval/` of the repository `NJU-LINK/MT-Video-Bench`: `mtqa/ABILITY.json` maps a video's name to
its events, each with `event_index` and `mtqa`, which maps `Round 1` and so on to `User`,
`Assistant` and `Ability`. `checklist/ABILITY_CheckList.json` maps video and event to a list of
`round index` with questions `Q1` and so on and their answers `A1` and so on; rounds without a list
are not scored. Videos are `videos/NAME.mp4`. An earlier version of that code has `data` for
`mtqa`, the rounds beside `event_index`, and `event_1` for event 1 in checklists; this is read, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from raincheck_hf.bench.dialogues.converters.fields import optional_text, read_json, text_of
from raincheck_hf.bench.dialogues.converters.media import Store
from raincheck_hf.bench.dialogues.format import Check, Dialogue, Turn

_ROUND = re.compile(r"Round (\d+)")


def read_mt_video_bench(source: Path, store: Store) -> Iterator[Callable[[], Dialogue]]:
    """Dialogues from a folder with `mtqa`, `checklist` and `videos`.

    Args:
        source: The folder.
        store: How videos are named.

    Raises:
        ValueError: No such folders, or another layout.
    """
    folders = [source / name for name in ("mtqa", "data") if (source / name).is_dir()]
    files = sorted(folders[0].glob("*.json")) if folders else []
    if not files:
        raise ValueError(
            f"no mtqa/*.json in {source}; give the folder that holds mtqa, checklist and videos"
        )
    for path in files:
        checklist = source / "checklist" / f"{path.stem}_CheckList.json"
        if not checklist.is_file():
            raise ValueError(f"no such file: {checklist}, which says how {path} is scored")
        listed = read_json(checklist, dict)
        for video, events in read_json(path, dict).items():
            if not isinstance(events, list):
                raise ValueError(f"{path}, {video!r}: must be a list of events; got {events!r}")
            for number, event in enumerate(events):
                place = f"{path}, {video!r}, event {number + 1}"
                checks = _checks(listed.get(video), event, f"{checklist}, {video!r}")
                shown = source / "videos" / f"{video}.mp4"
                yield partial(_dialogue, event, checks, path.stem, shown, place, store)


def _dialogue(
    event: Mapping[str, Any],
    checks: Mapping[int, tuple[Check, ...]],
    ability: str,
    video: Path,
    place: str,
    store: Store,
) -> Dialogue:
    turns = []
    for number, record in _rounds(event, place):
        here = f"{place}, round {number}"
        listed = checks.get(number, ())
        turns.append(
            Turn(
                question=text_of(record, "User", here),
                reference=text_of(record, "Assistant", here),
                scoring="checklist" if listed else "none",
                checklist=listed,
                category=optional_text(record, "Ability"),
            )
        )
    turns[0] = replace(turns[0], videos=(store.found(video),))
    return Dialogue(
        id=f"{ability}/{video.stem}/{event['event_index']}", turns=tuple(turns), category=ability
    )


def _rounds(event: Mapping[str, Any], place: str) -> list[tuple[int, Any]]:
    records = event.get("mtqa", event)
    if not isinstance(records, Mapping):
        raise ValueError(f"{place}: 'mtqa' must map rounds to what was said; got {records!r}")
    found = {
        int(match[1]): record
        for name, record in records.items()
        if (match := _ROUND.fullmatch(name))
    }
    if not found or sorted(found) != list(range(1, len(found) + 1)):
        raise ValueError(f"{place}: rounds must be 'Round 1', 'Round 2', …; got {list(records)}")
    return sorted(found.items())


def _checks(listed: Any, event: Any, place: str) -> dict[int, tuple[Check, ...]]:
    """The checklists of an event's rounds; none where the event has none."""
    if not isinstance(event, Mapping) or "event_index" not in event:
        raise ValueError(f"{place}: an event without 'event_index': {event!r}")
    name = str(event["event_index"])
    by_event = listed or {}
    found = by_event.get(name, by_event.get(f"event_{name}", []))
    checks: dict[int, tuple[Check, ...]] = {}
    for item in found:
        here = f"{place}, event {name}"
        number = item.get("round index") if isinstance(item, Mapping) else None
        if not isinstance(number, int):
            raise ValueError(f"{here}: 'round index' must be a number; got {item!r}")
        count = sum(1 for key in item if re.fullmatch(r"Q\d+", key))
        checks[number] = tuple(
            Check(text_of(item, f"Q{at}", here), text_of(item, f"A{at}", here).capitalize())
            for at in range(1, count + 1)
        )
    return checks
