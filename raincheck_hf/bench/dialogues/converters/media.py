"""Files that dialogues show: paths relative to the data file, and pictures written beside it."""

from __future__ import annotations

import io
import os
from pathlib import Path

from PIL import Image, UnidentifiedImageError


class MissingMedia(Exception):
    """A picture or a video that a dialogue names is not there."""


class Store:
    """The media of a data file that is being made.

    Args:
        out: The data file; pictures go to `NAME.media` beside it, made when the first one comes.

    Raises:
        ValueError: That folder is there already.
    """

    def __init__(self, out: Path) -> None:
        self.folder = out.with_suffix(".media")
        self._base = out.parent
        if self.folder.exists():
            raise ValueError(
                f"{self.folder} is there already; name another file, or remove it first"
            )

    def picture(self, name: str, image: Image.Image) -> str:
        """Write a picture without loss; returns its path from the data file's folder."""
        path = self._place(f"{name}.png")
        image.save(path)
        return self.relative(path)

    def encoded(self, name: str, data: bytes) -> str:
        """Write the bytes of a picture's file as they are; returns its path likewise.

        Raises:
            ValueError: They are no picture.
        """
        try:
            kind = Image.open(io.BytesIO(data)).format or "png"
        except (UnidentifiedImageError, OSError) as error:
            raise ValueError(f"{name}: {len(data)} bytes that are no picture: {error}") from error
        path = self._place(f"{name}.{kind.lower()}")
        path.write_bytes(data)
        return self.relative(path)

    def found(self, *places: Path) -> str:
        """The first of some places where there is a file, as data files hold it.

        Raises:
            MissingMedia: There is none.
        """
        for place in places:
            if place.is_file():
                return self.relative(place)
        raise MissingMedia(f"no file at {' or '.join(map(str, places))}")

    def relative(self, path: Path) -> str:
        """A path as data files hold it."""
        return Path(os.path.relpath(path, self._base)).as_posix()

    def _place(self, name: str) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / name
