"""Published benchmarks, as they are downloaded, to dialogues in this package's format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from raincheck_hf.bench.dialogues.converters.convbench import read_convbench
from raincheck_hf.bench.dialogues.converters.media import MissingMedia, Store
from raincheck_hf.bench.dialogues.converters.mt_video_bench import read_mt_video_bench
from raincheck_hf.bench.dialogues.converters.multiverse import read_multiverse
from raincheck_hf.bench.dialogues.format import Dialogue, refuse_existing

Converter = Callable[[Path, Store], Iterable[Callable[[], Dialogue]]]
"""Takes a source and where media go; gives one call a dialogue, which may raise MissingMedia."""

CONVERTERS: Mapping[str, Converter] = {
    "multiverse": read_multiverse,
    "convbench": read_convbench,
    "mt-video-bench": read_mt_video_bench,
}


@dataclass(frozen=True)
class Conversion:
    """What came of a source.

    Attributes:
        dialogues: In the source's order.
        notes: For the user.
    """

    dialogues: list[Dialogue]
    notes: list[str]


def convert(kind: str, source: Path, out: Path, skip_missing: bool = False) -> Conversion:
    """Read a benchmark; media that it holds inside its files are written beside `out`.

    Args:
        kind: A key of `CONVERTERS`.
        source: What the user downloaded.
        out: The data file to be, which must not exist yet.
        skip_missing: Leave out dialogues whose media are not there.

    Raises:
        ValueError: The source is not laid out as published; says what was looked for, and where.
    """
    refuse_existing(out)
    if not source.exists():
        raise ValueError(f"no such file or folder: {source}")
    dialogues: list[Dialogue] = []
    missing: list[str] = []
    for make in CONVERTERS[kind](source, Store(out)):
        try:
            dialogues.append(make())
        except MissingMedia as error:
            if not skip_missing:
                raise ValueError(f"{error}; --skip-missing leaves such dialogues out") from error
            missing.append(str(error))
    notes = []
    if missing:
        notes.append(
            f"{len(missing)} dialogues left out for missing media; the first: {missing[0]}"
        )
    return Conversion(dialogues, notes)
