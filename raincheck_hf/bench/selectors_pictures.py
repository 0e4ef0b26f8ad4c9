"""A photograph with the tokens that each method selects. Photographs come from scikit-image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from raincheck_hf.bench import checkpoints
from raincheck_hf.bench.dialogue import Asked, Script
from raincheck_hf.config import RaincheckConfig

PHOTOS = ("chelsea", "coffee")
QUESTION = "What is shown here?"
_SIDE = 288
_EDGE = 24
_INK, _PAPER, _MARK = (32, 36, 44), (250, 250, 247), (228, 160, 32)


class What(Protocol):
    """What is drawn."""

    @property
    def models(self) -> tuple[str, ...]:
        """The first one selects."""

    @property
    def selectors(self) -> tuple[str, ...]:
        """Registered names."""

    @property
    def retention(self) -> float:
        """Fraction of tokens selected."""

    @property
    def device(self) -> str:
        """Where the model runs."""


def draw_selections(what: What, folder: Path, photos: Sequence[str] = PHOTOS) -> list[Path]:
    """Draw one sheet a photograph, a panel for each method; what is left out is dimmed.

    Args:
        what: methods, model and retention.
        folder: for the pictures.
        photos: names in `skimage.data`.

    Returns:
        The files, `selectors-PHOTO.png`.

    Raises:
        ImportError: scikit-image is not installed.
    """
    import skimage.data

    model, processor = checkpoints.load(what.models[0], what.device)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in photos:
        photo = _square(Image.fromarray(np.asarray(getattr(skimage.data, name)())))
        panels = [
            (selector, _panel(photo, _selected(model, processor, photo, selector, what)))
            for selector in what.selectors
        ]
        path = folder / f"selectors-{name}.png"
        # A palette keeps a sheet small; dithering keeps it smooth.
        _sheet(panels, what.retention).quantize(192).save(path, optimize=True)
        written.append(path)
    return written


def _square(photo: Image.Image) -> Image.Image:
    """The middle of a photograph, `_SIDE` pixels wide and high."""
    side = min(photo.size)
    left, top = ((length - side) // 2 for length in photo.size)
    box = (left, top, left + side, top + side)
    return photo.convert("RGB").crop(box).resize((_SIDE, _SIDE), Image.Resampling.LANCZOS)


def _selected(
    model: Any, processor: Any, photo: Image.Image, selector: str, what: What
) -> np.ndarray:
    """bool [h, w], one for each token of the picture."""
    script = Script(processor, photo, [Asked(QUESTION, "", 1)], what.device)
    config = RaincheckConfig(selector=selector, retention=what.retention, completion="lazy")
    report = script.run(model, "hard", config)[0].report
    first = min(int(places.min()) for places in (report.selected, report.deferred))
    mask = np.zeros(report.n_visual, dtype=bool)
    mask[report.selected.numpy() - first] = True
    side = math.isqrt(len(mask))
    return mask.reshape(side, side)


def _panel(photo: Image.Image, mask: np.ndarray) -> Image.Image:
    """Selected cells as they are, with a frame; the others dimmed."""
    edge = _SIDE // mask.shape[0]
    panel = Image.blend(photo, Image.new("RGB", photo.size, _PAPER), 0.72)
    pen = ImageDraw.Draw(panel)
    for row, column in zip(*mask.nonzero(), strict=True):
        left, top = int(column) * edge, int(row) * edge
        panel.paste(photo.crop((left, top, left + edge, top + edge)), (left, top))
        pen.rectangle((left, top, left + edge - 1, top + edge - 1), outline=_MARK)
    return panel


def _sheet(panels: Sequence[tuple[str, Image.Image]], retention: float) -> Image.Image:
    across = 5
    rows = -(-len(panels) // across)
    width = across * (_SIDE + _EDGE) + _EDGE
    sheet = Image.new("RGB", (width, rows * (_SIDE + 2 * _EDGE) + 2 * _EDGE), _PAPER)
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(18)
    title = f'{100 * retention:.0f} % of the tokens, "{QUESTION}"'
    pen.text((_EDGE, _EDGE // 2), title, fill=_INK, font=font)
    for at, (name, panel) in enumerate(panels):
        left = _EDGE + at % across * (_SIDE + _EDGE)
        top = 2 * _EDGE + at // across * (_SIDE + 2 * _EDGE)
        pen.text((left, top - 4), name, fill=_INK, font=font)
        sheet.paste(panel, (left, top + _EDGE))
    return sheet
