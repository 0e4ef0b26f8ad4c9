"""Pictures and videos that people hand in: read, checked, shrunk to what the model can use."""

from __future__ import annotations

import base64
import io
import math
import mimetypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import av
from PIL import Image, ImageOps

MOST_SECONDS = 60
_PICTURES_A_SECOND, _FEWEST, _MOST = 2, 4, 32
# Frames beyond this gain nothing: processors shrink videos much further.
_FRAME_SIDE = 768
_SHOWN_SIDE = 448


class BadMedia(ValueError):
    """A file that cannot be used; the text says which and why."""


@dataclass(frozen=True, eq=False)
class Medium:
    """One picture or video.

    Attributes:
        name: How to call it.
        kind: What it is.
        pictures: The picture, or the video's pictures.
        sample: Whether the demo drew it itself.
    """

    name: str
    kind: Literal["image", "video"]
    pictures: Sequence[Image.Image]
    sample: bool = False

    @cached_property
    def shown(self) -> list[str]:
        """Small copies for the page, as data URIs: drawing never touches the large ones."""
        return [_data_uri(picture) for picture in self.pictures]


def read_file(path: str | Path, most_pixels: int | None = None) -> Medium:
    """Read an upload.

    Args:
        path: The file; its name's ending tells pictures from videos.
        most_pixels: Larger pictures are shrunk to this many pixels.

    Raises:
        BadMedia: The file is not what its name says, is broken, or is too long a video.
    """
    path = Path(path)
    guessed = mimetypes.guess_type(path.name)[0] or ""
    if guessed.startswith("video/"):
        return Medium(path.name, "video", _read_video(path))
    return Medium(path.name, "image", [_read_picture(path, most_pixels)])


def _read_picture(path: Path, most_pixels: int | None) -> Image.Image:
    try:
        with Image.open(path) as picture:
            width, height = picture.size
            if most_pixels is not None and width * height > most_pixels:
                scale = math.sqrt(most_pixels / (width * height))
                picture.thumbnail((max(1, int(width * scale)), max(1, int(height * scale))))
            upright = ImageOps.exif_transpose(picture)
            return upright.convert("RGB")
    except Image.DecompressionBombError as error:
        raise BadMedia(f"{path.name} is too large: {error}") from error
    except (OSError, SyntaxError, ValueError) as error:  # whatever a decoder finds wrong
        raise BadMedia(
            f"{path.name} cannot be read as a picture. It may be broken, or be something else "
            "under a picture's name; PNG, JPEG, WebP and GIF work"
        ) from error


def _read_video(path: Path) -> list[Image.Image]:
    """Pictures at even distances, an even number of them: two make one frame for the model."""
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise BadMedia(f"{path.name} holds no pictures")
            seconds = (container.duration or 0) / av.time_base
            if seconds > MOST_SECONDS:
                raise BadMedia(
                    f"{path.name} lasts {seconds:.0f} s; cut it to {MOST_SECONDS} s or less"
                )
            total = sum(packet.size > 0 for packet in container.demux(video=0))
            wanted = _even_distances(total, seconds)
            container.seek(0)
            kept = {
                at: _frame_picture(frame)
                for at, frame in enumerate(container.decode(video=0))
                if at in wanted
            }
    except (av.FFmpegError, OSError) as error:
        raise BadMedia(
            f"{path.name} cannot be read as a video. It may be broken, or be something else "
            "under a video's name; MP4 and WebM work"
        ) from error
    if not kept:
        raise BadMedia(f"{path.name} holds no pictures")
    last = kept[max(kept)]  # stands for what a cut file lacks at its end
    return [kept.get(at, last) for at in wanted]


def _even_distances(total: int, seconds: float) -> list[int]:
    """Which of a video's pictures to take; some twice where it has few."""
    count = 2 * max(_FEWEST // 2, min(_MOST // 2, round(seconds * _PICTURES_A_SECOND / 2)))
    return [int((at + 0.5) * total / count) for at in range(count)]


def _frame_picture(frame: av.VideoFrame) -> Image.Image:
    picture = frame.to_image()
    picture.thumbnail((_FRAME_SIDE, _FRAME_SIDE))
    return picture


def _data_uri(picture: Image.Image) -> str:
    small = picture.copy()
    small.thumbnail((_SHOWN_SIDE, _SHOWN_SIDE))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
