"""A checkpoint as a harness names it: a small model, a folder, or a name on the model hub."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForImageTextToText, AutoProcessor

from raincheck_hf.generation import enable_raincheck
from raincheck_hf.tiny import NAMES, folder


def load(
    pretrained: str,
    dtype: str = "auto",
    device: str = "cpu",
    device_map: str | None = None,
    attn_implementation: str | None = None,
) -> tuple[Any, Any]:
    """An enabled model in eval mode, and its processor.

    Args:
        pretrained: `"qwen3_vl"` or `"qwen3_5"` for the small models, a folder, or a hub name.
        dtype: A torch dtype's name, or `"auto"` for the checkpoint's own.
        device: Where it goes as a whole, unless there is a device map.
        device_map: As in `from_pretrained`.
        attn_implementation: `"sdpa"` or `"eager"`; None leaves the choice to transformers.

    Raises:
        ValueError: The architecture or the attention implementation is not supported.
        OSError: There is no such checkpoint.
    """
    if attn_implementation not in (None, "sdpa", "eager"):
        raise ValueError(
            f"attn_implementation must be sdpa or eager, which take raincheck's masks; "
            f"got {attn_implementation!r}"
        )
    source = folder(pretrained) if pretrained in NAMES else pretrained
    chosen = {"attn_implementation": attn_implementation} if attn_implementation else {}
    mapped = {"device_map": device_map} if device_map else {}
    model: Any = AutoModelForImageTextToText.from_pretrained(
        source, dtype=dtype, **chosen, **mapped
    )
    if not mapped:
        model = model.to(device)
    return enable_raincheck(model.eval()), AutoProcessor.from_pretrained(source)
