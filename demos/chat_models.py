"""Models to talk to: the two small ones, or any supported checkpoint."""

from __future__ import annotations

import threading
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from raincheck_hf import enable_raincheck
from raincheck_hf.tiny import NAMES, folder


class Models:
    """Loads each model once.

    Attributes:
        names: What can be chosen.
    """

    def __init__(self, model: str | None = None) -> None:
        """Offer one checkpoint, or the small models where none is named.

        Args:
            model: A small model's name, a folder, or a hub id.
        """
        self.names: tuple[str, ...] = NAMES if model is None else (model,)
        self._loaded: dict[str, tuple[Any, Any]] = {}
        self._loading = threading.Lock()

    def get(self, name: str) -> tuple[Any, Any]:
        """A model, enabled, and its processor.

        Raises:
            ValueError: Not offered, or of an architecture that is not supported.
            OSError: There is no such checkpoint.
        """
        if name not in self.names:
            raise ValueError(f"model {name!r} is not offered here; {', '.join(self.names)} are")
        with self._loading:
            if name not in self._loaded:
                self._loaded[name] = _load(name)
            return self._loaded[name]


def is_tiny(name: str) -> bool:
    """Whether a name means one of the small models, which know handwritten boards only."""
    return name in NAMES


def most_pixels(processor: Any) -> int | None:
    """The largest picture that the processor does not shrink, in pixels; None if it says none."""
    size = getattr(processor.image_processor, "size", None) or {}
    most = size.get("longest_edge") if hasattr(size, "get") else None
    return int(most) if most else None


def _load(name: str) -> tuple[Any, Any]:
    path = folder(name) if is_tiny(name) else name
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # bf16 is slow on most CPUs.
    dtype: Any = "auto" if device == "cuda" and not is_tiny(name) else torch.float32
    model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype)
    return enable_raincheck(model.to(device).eval()), AutoProcessor.from_pretrained(path)
