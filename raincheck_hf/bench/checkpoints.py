"""Models to measure or to talk to: a small one by name, or any local checkpoint by its folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from raincheck_hf.generation import enable_raincheck
from raincheck_hf.tiny import NAMES, folder

_SAMPLE = 1 << 20


def locate(model: str) -> Path:
    """The folder of a model.

    Args:
        model: A small model's name, or a path.

    Raises:
        ValueError: It is neither.
    """
    path = folder(model) if model in NAMES else Path(model).expanduser()
    if not (path / "config.json").is_file():
        raise ValueError(
            f"no checkpoint at {model!r}: give a folder that holds config.json and the weights, "
            f"or one of the small models {', '.join(NAMES)}"
        )
    return path


def load(model: str, device: str = "cpu", dtype: str = "float32") -> tuple[Any, Any]:
    """An enabled model in eval mode, and its processor.

    Args:
        model: As in `locate`.
        device: Where it goes, as torch names it.
        dtype: A torch dtype's name, or `"auto"` for the checkpoint's own.

    Raises:
        ValueError: There is no such model, device or dtype, or the architecture is not supported.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    path = locate(model)
    check_device(device)
    kind = dtype if dtype == "auto" else getattr(torch, dtype, None)
    if kind != "auto" and not isinstance(kind, torch.dtype):
        raise ValueError(f"dtype {dtype!r} is unknown; use auto, float32, bfloat16 or float16")
    try:
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            path, dtype=kind, local_files_only=True
        )
        processor = AutoProcessor.from_pretrained(path, local_files_only=True)
    except OSError as error:  # the folder is there, but not whole
        raise ValueError(f"the checkpoint at {model!r} cannot be read: {error}") from error
    return enable_raincheck(loaded.to(device).eval()), processor


def check_device(device: str) -> None:
    """Refuse a device that is not there.

    Raises:
        ValueError: Names what is there.
    """
    try:
        kind = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device {device!r} is unknown; use cpu, cuda or cuda:N") from None
    there = torch.cuda.device_count() if kind.type == "cuda" else 1
    if (kind.index or 0) >= there:
        raise ValueError(f"device {device!r} is not there; torch sees {there} GPU(s)")


def is_recurrent(model: str) -> bool:
    """Whether a model has recurrent layers, without loading it."""
    config = json.loads((locate(model) / "config.json").read_text(encoding="utf-8"))
    return "linear_attention" in (config.get("text_config", config).get("layer_types") or ())


def fingerprint(model: str) -> str:
    """Tells weights apart that stand under one name: 12 hex digits.

    It reads both ends of each weight file, which is quick for a large checkpoint, too.
    """
    digest = hashlib.sha256()
    for path in sorted(locate(model).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE))
            file.seek(max(0, size - _SAMPLE))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:12]
