"""`raincheck-hf plot`: pictures of rows that were measured. Needs matplotlib (extra `demo`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from raincheck_hf.bench.kinds import read_kinds
from raincheck_hf.bench.plots_costs import gaps_figures, memory_figures, state_map_figures
from raincheck_hf.bench.plots_quality import quality_figures
from raincheck_hf.bench.rows import Row

Draw = Callable[[Sequence[Row]], Iterator[tuple[str, Any]]]

PICTURES: Mapping[str, Draw] = {
    "quality": quality_figures,
    "state_map": state_map_figures,
    "memory": memory_figures,
    "gaps": gaps_figures,
}
"""By a row's field `bench`, what draws rows of that kind: names and matplotlib figures."""


def draw(paths: Iterable[Path], out: Path) -> list[Path]:
    """Draw all that the rows have to show.

    Args:
        paths: JSON Lines, as the subcommands of `bench` write them; kinds may be mixed.
        out: Folder for the pictures; created. A picture of the same name is replaced.

    Returns:
        The files written.

    Raises:
        ValueError: A file cannot be read, or none of the rows has a picture.
        ImportError: matplotlib is not installed.
    """
    kinds = read_kinds(paths)
    for kind in sorted(kinds.keys() - PICTURES.keys()):
        print(f"{len(kinds[kind])} row(s) of {kind!r} have no picture", file=sys.stderr)
    written = []
    for kind, figures in PICTURES.items():
        for name, figure in figures(kinds[kind]) if kind in kinds else ():
            out.mkdir(parents=True, exist_ok=True)
            path = out / f"{name}.png"
            _save(figure, path)
            written.append(path)
    if not written:
        raise ValueError(f"no row has a picture; kinds that have one: {', '.join(PICTURES)}")
    return written


def _save(figure: Any, path: Path) -> None:
    """Write a PNG with a palette: few colours are in use, and a third of the bytes is enough."""
    from PIL import Image

    drawn = BytesIO()
    figure.savefig(drawn, dpi=110)
    picture = Image.open(drawn).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
