"""ConvBench (arXiv 2403.20194) from its repository: `ConvBench.xlsx` and `visit_bench_images`.

The sheet in the repository `shirlyliu64/ConvBench` has the columns `ID`, `image_id` and
`The_first_turn_instruction` to `The_third_turn_instruction`, and had `third_turn_demands` in
earlier commits. The benchmark's own evaluation reads more columns, which a fuller sheet may have:
`first_turn_answer` to `third_turn_answer` (by people), `First_turn_instruction_category` and so
on, and `instruction-conditioned-caption`. They are used where they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from raincheck_hf.bench.dialogues.converters.fields import optional_text, text_of
from raincheck_hf.bench.dialogues.converters.media import Store
from raincheck_hf.bench.dialogues.converters.sheet import read_sheet
from raincheck_hf.bench.dialogues.format import Check, Dialogue, Turn

_TURNS = ("first", "second", "third")
_LEVELS = {"first": "perception", "second": "reasoning", "third": "creation"}
_POINT = re.compile(r"^\s*\d+\s*[.)、]\s*", re.MULTILINE)


def read_convbench(source: Path, store: Store) -> Iterator[Callable[[], Dialogue]]:
    """Dialogues from a folder with `ConvBench.xlsx`, or from that file.

    Args:
        source: The folder or the file; pictures are in `visit_bench_images` beside the file.
        store: How pictures are named.

    Raises:
        ValueError: No such file, or another layout.
    """
    path = source / "ConvBench.xlsx" if source.is_dir() else source
    if not path.is_file():
        raise ValueError(f"no ConvBench.xlsx in {source}; give the folder of the repository")
    for number, cells in read_sheet(path):
        yield partial(_dialogue, cells, f"{path}, row {number}", path.parent, store)


def _dialogue(cells: Mapping[str, str], place: str, folder: Path, store: Store) -> Dialogue:
    picture = text_of(cells, "image_id", place)
    images = folder / "visit_bench_images"
    # The evaluation looks one folder deeper than the repository has them.
    shown = store.found(images / picture, images / "images" / picture)
    turns = [_turn(cells, name, place) for name in _TURNS]
    turns[0] = replace(turns[0], images=(shown,))
    return Dialogue(
        id=f"convbench-{text_of(cells, 'ID', place)}",
        turns=tuple(turns),
        context=optional_text(cells, "instruction-conditioned-caption"),
    )


def _turn(cells: Mapping[str, str], name: str, place: str) -> Turn:
    reference = optional_text(cells, f"{name}_turn_answer")
    points = _POINT.split(optional_text(cells, f"{name}_turn_demands") or "")
    category = optional_text(cells, f"{name.capitalize()}_turn_instruction_category")
    return Turn(
        question=text_of(cells, f"The_{name}_turn_instruction", place),
        reference=reference,
        # Its own evaluation compares with people's answers; without them it can only be rated.
        scoring="reference" if reference else "rating",
        checklist=tuple(Check(point.strip()) for point in points if point.strip()),
        category=category or _LEVELS[name],
    )
