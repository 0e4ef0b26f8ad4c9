"""Two small models with the real architectures that can see, and boards to show them.

`load` needs no download. Questions and boards are in `boards`, the training in `train`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
    Qwen3VLProcessor,
)

from raincheck_hf.tiny.boards import Board, as_video, make_board
from raincheck_hf.tiny.configs import NAMES

__all__ = ["NAMES", "Board", "as_video", "folder", "load", "make_board"]


def folder(name: str) -> Path:
    """The folder of a small model, fit for `from_pretrained`.

    Args:
        name: `"qwen3_vl"` or `"qwen3_5"`.

    Raises:
        ValueError: there is no small model of that name.
    """
    if name not in NAMES:
        raise ValueError(f"the small model {name!r} is unknown; known are {', '.join(NAMES)}")
    return Path(__file__).parent / name


def load(
    name: str,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attn_implementation: str = "sdpa",
) -> tuple[PreTrainedModel, Qwen3VLProcessor]:
    """Load a small model, in eval mode, and its processor.

    Args:
        name: `"qwen3_vl"` or `"qwen3_5"`.
        dtype: of the parameters. CPUs are at their best with fp32.
        device: where the model goes.
        attn_implementation: as in `from_pretrained`.

    Raises:
        ValueError: there is no small model of that name.
    """
    path = folder(name)
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=dtype, attn_implementation=attn_implementation, local_files_only=True
    )
    processor = AutoProcessor.from_pretrained(path, local_files_only=True)
    return model.to(device).eval(), processor
