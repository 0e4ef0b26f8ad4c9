"""Reading what others wrote, with errors that say where it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def text_of(record: Any, field: str, place: str) -> str:
    """A text that is not empty.

    Args:
        record: An object.
        field: Its field.
        place: Where the record stands, for errors.

    Raises:
        ValueError: It is missing, empty or no text.
    """
    value = record.get(field) if isinstance(record, Mapping) else None
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{place}: {field!r} must be a text; got {value!r}")
    return value.strip()


def optional_text(record: Mapping[str, Any], field: str) -> str | None:
    """A text; None where it is missing or empty."""
    value = record.get(field)
    return value.strip() if isinstance(value, str) and value.strip() else None


def read_json(path: Path, kind: type) -> Any:
    """A JSON file.

    Args:
        path: The file.
        kind: What its outermost value must be.

    Raises:
        ValueError: It cannot be read, or is something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, kind):
        raise ValueError(f"{path} must hold a {kind.__name__}; got a {type(value).__name__}")
    return value
